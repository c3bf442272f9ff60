"use strict";
// Draws the charts from the values in #data, and keeps what was chosen over a reload.
(() => {
  const page = JSON.parse(document.getElementById("data").textContent);
  const key = `treadle ${page.title} ${location.pathname}`;
  const palettes = {  // told apart by readers with any kind of colour vision
    light: ["#0072b2", "#d55e00", "#009e73", "#aa4499", "#b58900", "#56b4e9", "#666666"],
    dark: ["#56b4e9", "#ff8c42", "#2fcf9f", "#e39ad0", "#f0c94b", "#9db8ff", "#bbbbbb"],
  };
  const dashes = ["solid", "dash", "longdash", "dashdot"];  // dots are those of validation and test
  const parts = ["training", "validation", "test", "skipped", "retried"];
  const symbols = { best: "star", skipped: "x", retried: "triangle-up" };
  const axisTitles = { step: "Step", epoch: "Epoch" };
  const spans = [[1, "s"], [60, "min"], [3600, "h"], [86400, "days"]];
  const darkWanted = matchMedia("(prefers-color-scheme: dark)");
  const touched = matchMedia("(pointer: coarse)").matches;
  const state = {
    axis: page.axes[0], smooth: page.smooth, log: decades(), hidden: [], theme: null, x: null, y: {}, filter: "",
    fold: page.groups !== null, sort: null, ...load(),
  };
  const filtered = new Set();  // runs that the filter of the table leaves out
  if (!page.axes.includes(state.axis)) state.axis = page.axes[0];
  let following = false;  // true while charts take over the zoom of another
  const also = [];  // what is drawn beside the charts: the table of runs and the parallel coordinates

  function load() {
    try { return JSON.parse(sessionStorage.getItem(key)) || {}; } catch { return {}; }
  }
  function save() {
    try { sessionStorage.setItem(key, JSON.stringify(state)); } catch { /* a browser without storage forgets */ }
  }
  function values(chart) {
    return chart.series.flatMap((one) => one.y.filter((value) => value !== null));
  }
  function decades() {  // whether a loss falls so far that a linear axis would show a flat line
    return page.charts.filter((chart) => chart.key === "loss").some((chart) => {
      const all = values(chart), least = Math.min(...all);
      return least > 0 && Math.max(...all) / least > 100;
    });
  }
  function heights(chart, log) {  // a constant is drawn in the middle of an axis that has its value
    const all = values(chart), least = Math.min(...all), most = Math.max(...all);
    const constant = all.length > 0 && most - least <= 1e-9 * Math.abs(most);
    return constant && most !== 0 && !log ? { range: [Math.min(0, 2 * most), Math.max(0, 2 * most)] }
      : { autorange: true };
  }
  const theme = () => state.theme || (darkWanted.matches ? "dark" : "light");
  const plot = (chart) => document.getElementById(`chart-${chart.key}`);
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function longest() {
    const all = page.charts.flatMap((chart) => chart.series.flatMap((one) => one.axes.time));
    return all.reduce((most, value) => Math.max(most, value || 0), 0);
  }
  const span = spans.filter(([seconds]) => longest() >= 2 * seconds).pop() || spans[0];
  function places(axes) {
    return state.axis === "time" ? axes.time.map((value) => value === null ? null : value / span[0]) : axes[state.axis];
  }
  function smoothed(values) {  // an exponential mean that starts without a bias; gaps stay gaps
    let sum = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      sum = state.smooth * sum + (1 - state.smooth) * value;
      weight = state.smooth * weight + (1 - state.smooth);
      return sum / weight;
    });
  }

  const folds = () => state.fold && page.groups !== null;
  const shown = (run) => !state.hidden.includes(run) && !filtered.has(run);
  const number = (run) => folds() ? page.groups[run] : run;  // which colour and dash a run has
  function colour(one) {
    const palette = palettes[theme()];
    if (page.runs.length > 1) return palette[number(one.run) % palette.length];
    const part = parts.indexOf(one.label === "best" ? "validation" : one.label);
    return palette[(part >= 0 ? part : Number(one.label.split(" ").pop()) || 0) % palette.length];
  }
  function meanAndDeviation(members) {  // of runs that differ by their seed, where at least half of them have a value
    const points = new Map();
    for (const one of members) {
      const place = one.axes.step.some((value) => value !== null) ? one.axes.step : one.axes.epoch;
      one.y.forEach((value, index) => {
        if (value === null || place[index] === null) return;
        const point = points.get(place[index]) || { values: [], axes: { step: [], epoch: [], time: [] } };
        point.values.push(value);
        for (const axis of Object.keys(point.axes)) point.axes[axis].push(one.axes[axis][index]);
        points.set(place[index], point);
      });
    }
    const kept = [...points.entries()].sort((a, b) => a[0] - b[0]).map(([, point]) => point)
      .filter((point) => 2 * point.values.length >= members.length);
    const mean = (values) => values.includes(null) ? null : values.reduce((sum, value) => sum + value, 0) / values.length;
    const centre = kept.map((point) => mean(point.values));
    const spread = kept.map((point, index) => point.values.length < 2 ? 0 : Math.sqrt(point.values.reduce(
      (sum, value) => sum + (value - centre[index]) ** 2, 0) / (point.values.length - 1)));
    const axes = {};
    for (const axis of ["step", "epoch", "time"]) axes[axis] = kept.map((point) => mean(point.axes[axis]));
    return { axes, centre, spread };
  }
  function foldedTraces(chart) {
    const sets = new Map(), marks = chart.series.filter((one) => one.style === "mark" && shown(one.run));
    for (const one of chart.series.filter((one) => one.style !== "mark" && shown(one.run))) {
      const name = `${page.groups[one.run]}|${one.label}|${one.style}`;
      sets.set(name, [...(sets.get(name) || []), one]);
    }
    const traces = [...sets.values()].flatMap((members) => {
      const one = members[0], log = state.log, ink = colour(one), name = page.groupNames[page.groups[one.run]];
      const { axes, centre, spread } = meanAndDeviation(members);
      const line = state.smooth && chart.smooth && centre.length > page.many ? smoothed : (values) => values;
      const middle = line(centre), deviation = line(spread), x = places(axes);
      const dash = one.label === "validation" || one.label === "test" ? "dot" : "solid";
      const lower = middle.map((value, index) => value - deviation[index]);
      const least = Math.min(...middle.filter((value) => value > 0)) / 10;
      const edge = { x, mode: "lines", type: "scatter", hoverinfo: "skip", showlegend: false, line: { width: 0, color: ink },
        meta: { run: one.run, label: "deviation" } };
      return [
        { ...edge, y: lower.map((value) => log && value <= 0 ? least : value) },
        { ...edge, y: middle.map((value, index) => value + deviation[index]), fill: "tonexty", fillcolor: `${ink}2e` },
        { x, y: middle, type: "scatter", mode: one.style === "dots" ? "lines+markers" : "lines", marker: { size: 5 },
          line: { color: ink, width: 2, dash }, name: `${name}, ${one.label}`, meta: { run: one.run, label: one.label },
          text: deviation.map((value) => value.toPrecision(2)),
          hovertemplate: `%{y:.4g} ± %{text}<extra>${name}, ${one.label}</extra>` },
      ];
    });
    return [...traces, ...runTraces({ ...chart, series: marks })];
  }
  function tracesOf(chart) {
    return folds() ? foldedTraces(chart) : runTraces(chart);
  }
  function runTraces(chart) {
    const several = page.runs.length > 1;
    return chart.series.flatMap((one) => {
      const trace = {
        x: places(one.axes), y: one.y, type: "scatter",
        name: several ? `${page.runs[one.run]}, ${one.label}` : one.label,
        visible: shown(one.run), meta: { run: one.run, label: one.label },
        hovertemplate: `%{y:.4g}<extra>${several ? `${page.runs[one.run]}, ` : ""}${one.label}</extra>`,
      };
      const width = one.style === "line" ? 1.8 : 2;
      const repeated = dashes[Math.floor(number(one.run) / palettes.light.length) % dashes.length];
      const dash = one.label === "validation" || one.label === "test" ? "dot" : several ? repeated : "solid";
      if (one.style === "mark") {
        return [{ ...trace, mode: "markers", text: one.texts, hovertemplate: "%{text}<extra></extra>",
          marker: { symbol: symbols[one.label] || "circle", size: 11, color: colour(one),
            line: { width: 1.5, color: css("--ground") } } }];
      }
      if (one.style === "dots") {
        return [{ ...trace, mode: "lines+markers", marker: { size: 5 }, line: { color: colour(one), width, dash } }];
      }
      if (!state.smooth || !chart.smooth || one.y.length <= page.many) {
        const whole = one.raw ? { x: places(one.raw.axes), y: one.raw.y } : {};
        const mode = one.y.length === 1 ? "lines+markers" : "lines"; // a line of one point would not be seen
        return [{ ...trace, ...whole, mode, line: { color: colour(one), width: 1.4, dash } }];
      }
      const faint = { ...trace, x: one.raw ? places(one.raw.axes) : trace.x, y: one.raw ? one.raw.y : one.y,
        mode: "lines", opacity: 0.3, hoverinfo: "skip", hovertemplate: null, showlegend: false,
        line: { color: colour(one), width: 1 } };
      return [faint, { ...trace, y: smoothed(one.y), mode: "lines", line: { color: colour(one), width, dash } }];
    });
  }
  function layoutOf(chart) {
    const grid = { gridcolor: css("--line"), zeroline: false, linecolor: css("--line"), automargin: true };
    const title = axisTitles[state.axis] || `Training time (${span[1]})`;
    const names = new Set(chart.series.map((one) => one.label));
    const x = state.x && state.x.axis === state.axis ? { range: state.x.range } : { autorange: true };
    const log = state.log && values(chart).every((value) => value > 0);
    const y = state.y[chart.key] ? { range: state.y[chart.key] } : heights(chart, log);
    return {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 12 },
      margin: { l: 52, r: 12, t: 8, b: 40 }, hovermode: "x unified", dragmode: touched ? false : "zoom",
      shapes: (page.resumes ? places(page.resumes) : []).filter((place) => place !== null).map((place) => ({
        type: "line", x0: place, x1: place, y0: 0, y1: 1, yref: "paper", layer: "below",
        line: { color: css("--muted"), width: 1, dash: "dot" },
      })),
      modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--muted"), activecolor: css("--accent") },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
      showlegend: page.runs.length === 1 && names.size > 1,
      legend: { orientation: "h", x: 0, y: 1, yanchor: "bottom", font: { size: 11 } },
      xaxis: { ...grid, ...x, title: { text: title, standoff: 6 },
        spikethickness: 1, spikedash: "dot", spikecolor: css("--muted"),
        unifiedhovertitle: { text: `${title} %{x}` }, hoverformat: state.axis === "step" ? ",d" : ",.2f" },
      yaxis: { ...grid, ...y, type: log ? "log" : "linear", exponentformat: "power", nticks: 7 },
    };
  }
  const config = { displaylogo: false, responsive: true, displayModeBar: touched ? false : "hover",
    modeBarButtons: [["toImage", "zoom2d", "pan2d", "resetScale2d"]] };

  function draw() {
    document.documentElement.dataset.theme = theme();
    for (const chart of page.charts) Plotly.react(plot(chart), tracesOf(chart), layoutOf(chart), config);
    for (const part of also) part();
    show();
    save();
  }
  function show() {
    document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis));
    }
    for (const kind of ["run", "seeds"]) {
      for (const button of document.querySelectorAll(`[data-${kind}]`)) {
        const one = Number(button.dataset[kind]), palette = palettes[theme()];
        button.parentElement.hidden = (kind === "seeds") !== folds();
        button.setAttribute("aria-pressed", String(membersOf(kind, one).some(shown)));
        const swatch = button.querySelector(".swatch");
        swatch.style.borderTopColor = palette[one % palette.length];
        swatch.style.borderTopStyle = ["solid", "dashed", "dotted", "double"][Math.floor(one / palette.length) % 4];
      }
    }
    const fold = document.getElementById("fold");
    if (fold) fold.checked = state.fold;
    const smooth = document.getElementById("smooth"), log = document.getElementById("log");
    if (smooth) smooth.value = state.smooth;
    if (log) log.checked = state.log;
  }

  function membersOf(kind, one) {  // the runs of a button
    return kind === "run" ? [one] : page.groups.flatMap((group, run) => group === one ? [run] : []);
  }
  function isolate(members) {  // shows these runs alone; where they are alone already, all
    const others = page.runs.map((_, run) => run).filter((run) => !members.includes(run));
    const alone = members.every(shown) && !others.some((run) => !state.hidden.includes(run));
    state.hidden = alone ? [] : others;
    draw();
  }

  function follow(chart, change) {
    if (following) return;
    const range = change["xaxis.range"] || (change["xaxis.range[0]"] !== undefined
      ? [change["xaxis.range[0]"], change["xaxis.range[1]"]] : null);
    const height = change["yaxis.range[0]"] !== undefined ? [change["yaxis.range[0]"], change["yaxis.range[1]"]] : null;
    const whole = change["xaxis.autorange"] || change["yaxis.autorange"];
    if (!range && !height && !whole) return;
    if (range) state.x = { axis: state.axis, range };
    if (height) state.y[chart.key] = height;
    if (whole) { state.x = null; state.y = {}; }
    following = true;
    const others = page.charts.filter((other) => other !== chart);
    const update = whole ? { "xaxis.autorange": true, "yaxis.autorange": true } : range ? { "xaxis.range": range } : {};
    const followed = others.map((other) => Plotly.relayout(plot(other), { ...update }));
    Promise.all(followed).finally(() => { following = false; });
    save();
  }

  window.treadlePage = { page, state, filtered, shown, colour, css, touched, isolate, draw, also };
  document.documentElement.dataset.theme = theme();
  draw();
  for (const chart of page.charts) plot(chart).on("plotly_relayout", (change) => follow(chart, change));
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => { state.axis = button.dataset.axis; state.x = null; draw(); });
  }
  for (const kind of ["run", "seeds"]) {
    for (const button of document.querySelectorAll(`[data-${kind}]`)) {
      const members = membersOf(kind, Number(button.dataset[kind]));
      button.addEventListener("click", () => {
        const others = state.hidden.filter((run) => !members.includes(run));
        state.hidden = members.some((run) => !state.hidden.includes(run)) ? [...others, ...members] : others;
        draw();
      });
      button.addEventListener("dblclick", () => isolate(members));
    }
  }
  const foldBox = document.getElementById("fold");
  if (foldBox) foldBox.addEventListener("change", () => { state.fold = foldBox.checked; draw(); });
  document.getElementById("theme").addEventListener("click", () => {
    state.theme = theme() === "dark" ? "light" : "dark";
    draw();
  });
  darkWanted.addEventListener("change", draw);
  const smooth = document.getElementById("smooth"), log = document.getElementById("log");
  if (smooth) smooth.addEventListener("input", () => { state.smooth = Number(smooth.value); draw(); });
  if (log) log.addEventListener("change", () => { state.log = log.checked; state.y = {}; draw(); });
  const reset = document.getElementById("reset");
  if (reset) reset.addEventListener("click", () => { state.x = null; state.y = {}; draw(); });
  for (const figure of document.querySelectorAll(".gallery figure")) {
    figure.querySelector("img").addEventListener("click", () => figure.classList.toggle("large"));
  }
  if (page.reload) {
    const age = Date.now() / 1000 - page.written;
    document.getElementById("old").hidden = age < 2 * page.reload + 30;
    setTimeout(() => location.reload(), page.reload * 1000);
  }
})();
