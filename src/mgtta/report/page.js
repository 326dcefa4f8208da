"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const boxes = [...document.querySelectorAll(".chart")];
  const drawn = new WeakMap(); // box -> the width it was drawn for

  const draw = (box) => {
    if (!box.clientWidth) return; // folded
    const menu = box.closest("figure").querySelector("select");
    drawChart(box, charts[box.dataset.chart], menu?.value);
    drawn.set(box, box.clientWidth);
  };
  const widths = new ResizeObserver((entries) => entries.forEach(({ target }) => {
    if (target.clientWidth !== drawn.get(target)) draw(target);
  }));
  boxes.forEach((box) => {
    draw(box);
    widths.observe(box);
    box.closest("figure").querySelector("select")?.addEventListener("change", () => draw(box));
  });

  // a table that has more to the side says so
  const cue = (scroll) => {
    const rest = scroll.scrollWidth - scroll.clientWidth - scroll.scrollLeft;
    scroll.parentElement.classList.toggle("more", rest > 2);
  };
  const sizes = new ResizeObserver((entries) => entries.forEach(({ target }) => cue(target)));
  document.querySelectorAll(".scroll").forEach((scroll) => {
    scroll.addEventListener("scroll", () => cue(scroll), { passive: true });
    sizes.observe(scroll);
  });

  // a link to a folded section opens it; on a phone the contents fold
  const open = () => {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    const folded = target?.closest("details");
    if (folded) folded.open = true;
    target?.scrollIntoView();
  };
  addEventListener("hashchange", open);
  const contents = document.getElementById("contents");
  const wide = matchMedia("(min-width: 64rem)");
  const fold = () => { contents.open = wide.matches; };
  wide.addEventListener("change", fold);
  fold();
  contents.addEventListener("click", (event) => {
    const link = event.target.closest("a");
    if (!link) return;
    if (!wide.matches) contents.open = false;
    if (link.hash === location.hash) open();
  });
  if (location.hash) open();

  // on paper all is as wide as the paper, and open but for what is long
  const print = (begins) => {
    document.documentElement.classList.toggle("printing", begins);
    document.querySelectorAll("main details").forEach((d) => {
      if (begins) d.dataset.was = d.open ? "1" : "";
      d.open = begins ? !d.classList.contains("fold") : Boolean(d.dataset.was);
    });
    document.querySelectorAll(".scroll > table").forEach((table) => {
      table.style.zoom = begins ? Math.min(1, table.parentElement.clientWidth / table.offsetWidth) : "";
    });
    boxes.forEach(draw);
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
