// The table of several runs, which sorts, filters and isolates, and the parallel coordinates below the charts.
(() => {
  const { page, state, filtered, shown, colour, css, touched, isolate, draw, also } = window.treadlePage;
  const table = document.getElementById("runs");
  if (!table) return;
  const body = table.tBodies[0], rows = [...body.rows], heads = [...table.tHead.rows[0].cells];
  const titles = heads.map((head) => head.textContent.trim());
  const valueOf = (row, column) => {
    const text = row.cells[column].dataset.value, value = Number(text);
    return text === undefined ? null : Number.isNaN(value) || text.trim() === "" ? text : value;
  };

  function compare(a, b, column) {  // numbers by size, texts in natural order, what is missing last
    const [one, other] = [valueOf(a, column), valueOf(b, column)];
    if (one === null || other === null) return (one === null) - (other === null);
    if (typeof one === "number" && typeof other === "number") return state.sort.up ? one - other : other - one;
    const order = String(one).localeCompare(String(other), undefined, { numeric: true });
    return state.sort.up ? order : -order;
  }
  function sort() {
    const column = state.sort ? titles.indexOf(state.sort.title) : -1;
    const order = column < 0 ? rows : [...rows].sort((a, b) => compare(a, b, column));
    order.forEach((row) => body.append(row));
    heads.forEach((head, index) => {
      head.setAttribute("aria-sort", index !== column ? "none" : state.sort.up ? "ascending" : "descending");
    });
  }

  function fits(row, term) {  // a comparison of a column, or a part of any text in the row
    const found = term.match(/^(.+?)(<=|>=|=|<|>)(.+)$/);
    if (!found) return row.textContent.toLowerCase().includes(term);
    const [, name, sign, wanted] = found;
    const column = titles.findIndex((title) => title.toLowerCase() === name);
    const near = column >= 0 ? column : titles.findIndex((title) => title.toLowerCase().includes(name));
    if (near < 0) return false;
    const value = valueOf(row, near), limit = Number(wanted);
    if (sign === "=") return String(value).toLowerCase() === wanted || value === limit;
    if (typeof value !== "number" || Number.isNaN(limit)) return false;
    return sign === "<" ? value < limit : sign === ">" ? value > limit : sign === "<=" ? value <= limit : value >= limit;
  }
  function filter() {
    const terms = state.filter.toLowerCase().split(/[\s,]+/).filter((term) => term);
    filtered.clear();
    for (const row of rows) {
      row.hidden = !terms.every((term) => fits(row, term));
      if (row.hidden) filtered.add(Number(row.dataset.row));
    }
  }

  function drawParallel() {
    const place = document.getElementById("parallel");
    if (!place) return;
    const axes = page.parallel, last = axes.length - 1;
    const traces = page.runs.flatMap((name, run) => shown(run) ? [{
      x: axes.map((_, index) => index), y: axes.map((axis) => axis.places[run]), type: "scatter", mode: "lines+markers",
      name, text: axes.map((axis) => `${axis.title}: ${axis.texts[run]}`), line: { color: colour({ run }), width: 1.6 },
      marker: { size: 6 }, opacity: 0.85, meta: { run }, hovertemplate: `${name}<br>%{text}<extra></extra>`,
    }] : []);
    const ticks = axes.flatMap((axis, index) => axis.ticks.map(([height, text]) => ({
      x: index, y: height, text, showarrow: false, xanchor: index === last ? "right" : "left",
      xshift: index === last ? -7 : 7, yshift: height > 0.5 ? 10 : -10, font: { size: 11, color: css("--muted") },
      bgcolor: css("--ground"), opacity: 0.9,
    })));
    const names = axes.map((axis, index) => ({
      x: index, y: 1.13, yref: "y", text: axis.title, showarrow: false, font: { size: 12, color: css("--ink") },
      xanchor: index === 0 ? "left" : index === last ? "right" : "center",
    }));
    Plotly.react(place, traces, {
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font: { color: css("--ink"), size: 12 },
      margin: { l: 16, r: 16, t: 16, b: 16 }, showlegend: false, hovermode: "closest", dragmode: false,
      annotations: [...ticks, ...names],
      shapes: axes.map((axis, index) => ({ type: "line", x0: index, x1: index, y0: 0, y1: 1, layer: "below",
        line: { color: css(axis.result ? "--accent" : "--muted"), width: 1.5 } })),
      xaxis: { visible: false, range: [-0.08, last + 0.08], fixedrange: true },
      yaxis: { visible: false, range: [-0.12, 1.22], fixedrange: true },
      hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") } },
    }, { displayModeBar: false, responsive: true, staticPlot: touched });
  }

  function showRows() {
    for (const row of rows) row.classList.toggle("away", !shown(Number(row.dataset.row)));
  }
  also.push(showRows, drawParallel);

  heads.forEach((head, index) => head.querySelector("button").addEventListener("click", () => {
    const same = state.sort && state.sort.title === titles[index];
    state.sort = same && !state.sort.up ? null : { title: titles[index], up: !same };
    sort();
    draw();
  }));
  for (const row of rows) row.addEventListener("click", () => isolate([Number(row.dataset.row)]));
  const box = document.getElementById("filter");
  box.value = state.filter;
  box.addEventListener("input", () => { state.filter = box.value; filter(); draw(); });
  document.getElementById("all").addEventListener("click", () => {
    state.hidden = [];
    state.filter = box.value = "";
    filter();
    draw();
  });
  sort();
  filter();
  draw();
})();
