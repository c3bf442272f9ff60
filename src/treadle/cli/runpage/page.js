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
    axis: page.axes[0], smooth: page.smooth, log: decades(), hidden: [], theme: null, x: null, y: {}, ...load(),
  };
  if (!page.axes.includes(state.axis)) state.axis = page.axes[0];
  let following = false;  // true while charts take over the zoom of another

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

  function colour(one) {
    const palette = palettes[theme()];
    if (page.runs.length > 1) return palette[one.run % palette.length];
    const part = parts.indexOf(one.label === "best" ? "validation" : one.label);
    return palette[(part >= 0 ? part : Number(one.label.split(" ").pop()) || 0) % palette.length];
  }
  function tracesOf(chart) {
    const several = page.runs.length > 1;
    return chart.series.flatMap((one) => {
      const trace = {
        x: places(one.axes), y: one.y, type: "scatter",
        name: several ? `${page.runs[one.run]}, ${one.label}` : one.label,
        visible: !state.hidden.includes(one.run), meta: { run: one.run, label: one.label },
        hovertemplate: `%{y:.4g}<extra>${several ? `${page.runs[one.run]}, ` : ""}${one.label}</extra>`,
      };
      const width = one.style === "line" ? 1.8 : 2;
      const repeated = dashes[Math.floor(one.run / palettes.light.length) % dashes.length];
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
    show();
    save();
  }
  function show() {
    document.getElementById("theme").textContent = theme() === "dark" ? "Light" : "Dark";
    for (const button of document.querySelectorAll("[data-axis]")) {
      button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis));
    }
    for (const button of document.querySelectorAll("[data-run]")) {
      const run = Number(button.dataset.run), palette = palettes[theme()];
      button.setAttribute("aria-pressed", String(!state.hidden.includes(run)));
      const swatch = button.querySelector(".swatch");
      swatch.style.borderTopColor = palette[run % palette.length];
      swatch.style.borderTopStyle = run >= palette.length ? "dashed" : "solid";
    }
    const smooth = document.getElementById("smooth"), log = document.getElementById("log");
    if (smooth) smooth.value = state.smooth;
    if (log) log.checked = state.log;
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

  document.documentElement.dataset.theme = theme();
  draw();
  for (const chart of page.charts) plot(chart).on("plotly_relayout", (change) => follow(chart, change));
  for (const button of document.querySelectorAll("[data-axis]")) {
    button.addEventListener("click", () => { state.axis = button.dataset.axis; state.x = null; draw(); });
  }
  for (const button of document.querySelectorAll("[data-run]")) {
    button.addEventListener("click", () => {
      const run = Number(button.dataset.run);
      state.hidden = state.hidden.includes(run) ? state.hidden.filter((one) => one !== run) : [...state.hidden, run];
      draw();
    });
  }
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
