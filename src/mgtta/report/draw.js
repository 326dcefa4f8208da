"use strict";
// Charts as SVG, from the page's JSON. Colours are CSS classes: light, dark and paper need no other drawing.
const drawChart = (() => {
  const NS = "http://www.w3.org/2000/svg";
  const LINE = 15; // px, from one label to the next
  const ORDER = ["ideal", "other", "still", "second", "best"]; // the last is drawn on top
  const pen = document.createElement("canvas").getContext("2d");

  const make = (parent, tag, attributes, text) => {
    const element = document.createElementNS(NS, tag);
    Object.entries(attributes).forEach(([name, value]) => element.setAttribute(name, value));
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };

  const widthOf = (text) => {
    pen.font = "600 12px system-ui, sans-serif"; // as the names that stand out
    return pen.measureText(text).width;
  };

  const fitted = (text, width) => {
    if (widthOf(text) <= width) return text;
    let n = text.length;
    while (n > 1 && widthOf(`${text.slice(0, n)}…`) > width) n -= 1;
    return `${text.slice(0, n)}…`;
  };

  // round numbers that cover a range
  const ticksOf = (low, high, count) => {
    const rough = (high - low || 1) / count;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = power * [1, 2, 5, 10].find((k) => k * power >= 0.7 * rough);
    const digits = Math.max(0, -Math.floor(Math.log10(step) + 1e-9));
    const found = [];
    for (let x = Math.ceil(low / step - 1e-9) * step; x <= high + step * 1e-9; x += step) found.push([x, x.toFixed(digits)]);
    return found;
  };

  const range = (values) => [Math.min(...values), Math.max(...values)];

  // positions as near as possible to those asked for, at least LINE apart, between top and bottom
  const spread = (labels, top, bottom) => {
    labels.sort((a, b) => a.at - b.at);
    let floor = top;
    labels.forEach((label) => { label.y = Math.max(label.at, floor); floor = label.y + LINE; });
    let ceiling = bottom;
    [...labels].reverse().forEach((label) => { label.y = Math.min(label.y, ceiling); ceiling = label.y - LINE; });
  };

  const scales = (chart, series, frame) => {
    const log = Boolean(chart.x.log);
    const along = (x) => (log ? Math.log10(x) : x);
    const xs = series.flatMap((s) => s.x).concat((chart.x.ticks || []).map(([x]) => x));
    const ys = series.flatMap((s) => s.y.flatMap((y, i) => [y - (s.error?.[i] || 0), y + (s.error?.[i] || 0)]));
    const ends = range(xs);
    let [left, right] = ends.map(along);
    let [low, high] = range(ys);
    if (chart.x.zero) left = 0;
    if (left === right) { left -= 0.5; right += 0.5; }
    const room = (high - low || 2) * 0.06;
    low = Math.max(low - room, Math.min(low, 0));
    high += room;
    return {
      x: (x) => frame.left + (frame.width * (along(x) - left)) / (right - left),
      y: (y) => frame.top + frame.height * (1 - (y - low) / (high - low)),
      xTicks: chart.x.ticks || ticksOf(...(chart.x.zero ? [0, ends[1]] : ends), Math.max(3, frame.width / 80))
        .filter(([, text]) => chart.x.zero || Number.isInteger(Number(text))),
      yTicks: ticksOf(low, high, 5),
    };
  };

  const axes = (svg, chart, scale, frame) => {
    const grid = make(svg, "g", { class: "axes" });
    const bottom = frame.top + frame.height;
    scale.yTicks.forEach(([y, text]) => {
      const at = scale.y(y);
      make(grid, "line", { x1: frame.left, x2: frame.left + frame.width, y1: at, y2: at });
      make(grid, "text", { x: frame.left - 6, y: at + 4, "text-anchor": "end" }, text);
    });
    let free = -Infinity;
    scale.xTicks.forEach(([x, text]) => {
      const half = widthOf(text) / 2;
      const at = Math.max(half, Math.min(scale.x(x), frame.all - half));
      if (at - half < free + 6) return;
      free = at + half;
      make(grid, "text", { x: at, y: bottom + 16, "text-anchor": "middle" }, text);
    });
    make(grid, "text", { class: "title", x: frame.left + frame.width / 2, y: bottom + 34, "text-anchor": "middle" },
      fitted(chart.x.title, frame.width));
    make(grid, "text", { class: "title", x: 0, y: 11 }, chart.y);
  };

  const lines = (svg, series, scale, joined) => {
    ORDER.flatMap((look) => series.filter((s) => s.look === look)).forEach((s) => {
      const group = make(svg, "g", { class: `series ${s.look}`, "data-name": s.name });
      const points = s.x.map((x, i) => [scale.x(x), scale.y(s.y[i])]);
      if (joined || points.length > 1) {
        make(group, "path", { d: points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("") });
      }
      (s.error || []).forEach((e, i) => {
        make(group, "line", { class: "error", x1: points[i][0], x2: points[i][0], y1: scale.y(s.y[i] - e), y2: scale.y(s.y[i] + e) });
      });
      if (s.dots) points.forEach(([x, y]) => make(group, "circle", { cx: x, cy: y, r: 3 }));
    });
  };

  // names at the ends of the curves, moved apart, with a thin line from the end to a name that had to move
  const endLabels = (svg, series, scale, frame, room) => {
    const labels = series.filter((s) => s.name).map((s) => {
      const end = [scale.x(s.x.at(-1)), scale.y(s.y.at(-1))];
      return { s, end, at: end[1] };
    });
    spread(labels, frame.top + 4, frame.top + frame.height);
    const edge = frame.left + frame.width;
    labels.forEach(({ s, end, y }) => {
      const group = make(svg, "g", { class: `name ${s.look}`, "data-name": s.name });
      if (Math.abs(y - end[1]) > 3 || edge - end[0] > 3) {
        make(group, "path", { class: "lead", d: `M${end[0] + 2} ${end[1]}L${edge + 3} ${end[1]}L${edge + 9} ${y}` });
      }
      make(group, "text", { x: edge + 11, y: y + 4 }, fitted(s.name, room - 12));
    });
  };

  // names beside points; a grey one that would cover another is left out, and shows when pointed at
  const pointLabels = (svg, series, scale, frame) => {
    const taken = [];
    [...ORDER].reverse().flatMap((look) => series.filter((s) => s.look === look)).forEach((s) => {
      const [x, y] = [scale.x(s.x.at(-1)), scale.y(s.y.at(-1))];
      const width = Math.min(widthOf(s.name), frame.width * 0.6);
      const right = x + 7 + width < frame.all;
      const box = { left: right ? x + 7 : x - 7 - width, top: y - 8, bottom: y + 8 };
      box.right = box.left + width;
      const covers = taken.some((b) => b.left < box.right && box.left < b.right && b.top < box.bottom && box.top < b.bottom);
      if (box.left < 0 || (covers && s.look === "other")) return;
      taken.push(box);
      make(make(svg, "g", { class: `name ${s.look}`, "data-name": s.name }), "text", { x: box.left, y: y + 4 }, fitted(s.name, width + 1));
    });
  };

  const pointing = (box, svg, chart, series, scale) => {
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    box.append(tip);
    const leave = () => {
      tip.hidden = true;
      svg.querySelectorAll(".hot").forEach((e) => e.classList.remove("hot"));
    };
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("pointermove", (event) => {
      const at = svg.getBoundingClientRect();
      const [px, py] = [event.clientX - at.left, event.clientY - at.top];
      let near = null;
      series.filter((s) => s.name).forEach((s) => s.x.forEach((x, i) => {
        const far = Math.hypot(scale.x(x) - px, scale.y(s.y[i]) - py);
        if (far < (near?.far ?? 40)) near = { far, s, i };
      }));
      leave();
      if (!near) return;
      const { s, i } = near;
      svg.querySelectorAll("[data-name]").forEach((e) => e.classList.toggle("hot", e.dataset.name === s.name));
      const x = chart.x.ticks?.find(([value]) => value === s.x[i])?.[1] ?? s.x[i];
      tip.textContent = `${s.name}: ${s.y[i].toFixed(1)} % (${[`${chart.x.title} ${x}`, s.text?.[i]].filter(Boolean).join(", ")})`;
      tip.hidden = false;
      tip.style.left = `${Math.max(0, Math.min(scale.x(s.x[i]) + 10, box.clientWidth - tip.offsetWidth))}px`;
      tip.style.top = `${Math.max(0, scale.y(s.y[i]) - tip.offsetHeight - 8)}px`;
    });
  };

  return (box, chart, view) => {
    const series = chart.views[view] || Object.values(chart.views)[0];
    const all = box.clientWidth;
    const named = series.filter((s) => s.name);
    const longest = Math.max(...named.map((s) => widthOf(s.name)));
    const room = chart.points ? 8 : Math.min(longest + 14, all * 0.36);
    const height = Math.max(230, chart.points ? 0 : LINE * named.length);
    const frame = { left: 34, top: 22, width: all - 34 - room, height, all };
    const svg = document.createElementNS(NS, "svg");
    const whole = frame.top + height + 40;
    Object.entries({ width: all, height: whole, role: "img", "aria-label": chart.title })
      .forEach(([name, value]) => svg.setAttribute(name, value));
    const scale = scales(chart, series, frame);
    axes(svg, chart, scale, frame);
    lines(svg, series, scale, !chart.points);
    if (chart.points) pointLabels(svg, series, scale, frame);
    else endLabels(svg, series, scale, frame, room);
    box.replaceChildren(svg);
    pointing(box, svg, chart, series, scale);
  };
})();
