"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const touch = matchMedia("(pointer: coarse)").matches;
  let printing = false;

  const theme = () => (dark.matches && !printing
    ? { ink: "#e6e9ec", quiet: "#9ba5af", line: "#333a41", box: "#1d2226" }
    : { ink: "#1c2024", quiet: "#5b6570", line: "#d9dee3", box: "#ffffff" });

  function layout(chart, size) {
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
      width: size.width, height: size.top + size.plot + size.below,
      margin: { l: 48, r: 12, t: size.top, b: size.below }, showlegend: true,
      legend: { orientation: "h", yref: "container", y: 0, yanchor: "bottom", x: 0, maxheight: 10000, font: { color: ink } },
    };
  }

  // a name in lines that fit into the legend
  const wrapped = (name, width) => name.split(" ").reduce((lines, word) => {
    const line = `${lines.at(-1)} ${word}`.trim();
    return 7 * line.length > width - 70 ? [...lines, word] : [...lines.slice(0, -1), line];
  }, [""]).filter(Boolean).join("<br>");

  const boxes = [...document.querySelectorAll(".chart")];
  const draw = (box) => {
    const chart = charts[box.dataset.chart];
    const menu = box.closest("figure").querySelector("select");
    const width = box.clientWidth;
    const hidden = new Set((box.data || []).filter((t) => t.visible === "legendonly").map((t) => t.uid));
    const shown = (menu ? chart.views[menu.value] : chart.traces).map((t) => ({ ...t, uid: t.name,
      name: wrapped(t.name, width), ...(hidden.has(t.name) ? { visible: "legendonly" } : {}) }));
    const react = (size) => Plotly.react(box, shown, layout(chart, size),
      { displaylogo: false, showSendToCloud: false, displayModeBar: touch ? false : "hover",
        modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"] });
    // drawn twice: what stands below the plot has a height once drawn, and the plot keeps its own
    const size = { width, top: touch ? 12 : 30, plot: printing ? 200 : 260, below: 200 + 100 * shown.length };
    react(size);
    const place = (part) => box.querySelector(part).getBoundingClientRect();
    const axis = place(".xtitle").bottom - place(".nsewdrag").bottom;
    react({ ...size, below: axis + 8 + place(".legend .bg").height });
  };
  const drawAll = () => boxes.forEach(draw);
  boxes.forEach((box) => {
    const menu = box.closest("figure").querySelector("select");
    if (menu) menu.addEventListener("change", () => draw(box));
  });
  drawAll();
  dark.addEventListener("change", drawAll);
  const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (target.clientWidth !== target.layout.width) draw(target);
  }));
  boxes.forEach((box) => widths.observe(box));

  // on paper all is as wide as the paper, and open but for what is long
  const print = (begins) => {
    printing = begins;
    document.documentElement.classList.toggle("printing", begins);
    document.querySelectorAll("details").forEach((d) => {
      if (begins) d.dataset.was = d.open ? "1" : "";
      d.open = begins ? !d.classList.contains("fold") : Boolean(d.dataset.was);
    });
    document.querySelectorAll(".scroll > table").forEach((table) => {
      table.style.zoom = begins ? Math.min(1, table.parentElement.clientWidth / table.offsetWidth) : "";
    });
    drawAll();
  };
  addEventListener("beforeprint", () => print(true));
  addEventListener("afterprint", () => print(false));

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
