"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  let printing = false;

  const theme = () => (dark.matches && !printing
    ? { ink: "#e6e9ec", quiet: "#9ba5af", line: "#333a41", box: "#1d2226" }
    : { ink: "#1c2024", quiet: "#5b6570", line: "#d9dee3", box: "#ffffff" });

  function layout(chart) {
    const { ink, quiet, line, box } = theme();
    const axis = (own) => ({ gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...own,
      title: { ...own.title, standoff: 8 } });
    return {
      ...chart.layout,
      xaxis: axis(chart.layout.xaxis),
      yaxis: axis(chart.layout.yaxis),
      font: { color: ink, size: 12, family: "system-ui, sans-serif" },
      hoverlabel: { bgcolor: box, bordercolor: line, font: { color: ink }, namelength: -1 },
      paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      modebar: { bgcolor: "rgba(0,0,0,0)", color: quiet, activecolor: ink },
      dragmode: touch ? false : "zoom", // a finger that moves scrolls the page
      margin: { l: 48, r: 12, t: touch ? 12 : 30, b: 40 }, showlegend: true,
      legend: { orientation: "h", y: -0.22, yanchor: "top", x: 0, font: { color: ink } },
    };
  }

  const boxes = [...document.querySelectorAll(".chart")];
  const draw = (box) => {
    const chart = charts[box.dataset.chart];
    const menu = box.closest("figure").querySelector("select");
    const traces = menu ? chart.views[menu.value] : chart.traces;
    const hidden = new Set((box.data || []).filter((t) => t.visible === "legendonly").map((t) => t.name));
    const shown = traces.map((t) => (hidden.has(t.name) ? { ...t, visible: "legendonly" } : { ...t }));
    return Plotly.react(box, shown, layout(chart),
      { responsive: true, displaylogo: false, showSendToCloud: false, displayModeBar: touch ? false : "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
  };
  const drawAll = () => boxes.forEach(draw);
  boxes.forEach((box) => {
    const menu = box.closest("figure").querySelector("select");
    if (menu) menu.addEventListener("change", () => draw(box));
  });
  drawAll();
  dark.addEventListener("change", drawAll);
  addEventListener("beforeprint", () => { printing = true; document.querySelectorAll("details").forEach((d) => {
    d.dataset.was = d.open ? "1" : ""; d.open = true; }); drawAll(); });
  addEventListener("afterprint", () => { printing = false; document.querySelectorAll("details").forEach((d) => {
    d.open = Boolean(d.dataset.was); }); drawAll(); });

  document.querySelectorAll("table.sortable").forEach((table) => {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      head.querySelector("button").addEventListener("click", () => {
        const text = head.classList.contains("text");
        const first = text ? "ascending" : "descending";
        const order = head.getAttribute("aria-sort") === first
          ? (first === "ascending" ? "descending" : "ascending") : first;
        heads.forEach((other) => other.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const body = table.tBodies[0];
        const key = (row) => row.cells[column].dataset.value;
        [...body.rows].sort((a, b) => {
          const [x, y] = [key(a), key(b)];
          if (text) return sign * x.localeCompare(y);
          if (x === "" || y === "") return (x === "") - (y === ""); // what is missing goes last
          return sign * (Number(x) - Number(y));
        }).forEach((row) => body.append(row));
      });
    });
  });
  document.documentElement.dataset.ready = "1";
})();
