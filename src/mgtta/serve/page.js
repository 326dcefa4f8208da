"use strict";
(() => {
  const $ = (id) => document.getElementById(id);
  const CARDS = 60; // drawn at most; the most recently used streams come first
  const POINTS = 2000; // kept of one stream
  const LATEST = 160; // points that "latest" shows
  const PANELS = [ // one that has no values is left out
    { title: "estimated accuracy", height: 150, percent: true, curves: [["source", "source_accuracy"], ["adapted", "accuracy"]] },
    { title: "sureness", height: 150, percent: true, curves: [["source", "source_confidence"], ["adapted", "confidence"]] },
    { title: "agreement with the source model", height: 84, percent: true, curves: [["agreement", "agreement"]] },
    { title: "entropy, nats", height: 84, percent: false, curves: [["entropy", "entropy"]] },
  ];
  const WORDS = {
    shift: ["shift", "A new domain begins"],
    recall: ["recall", "A known domain is back: what was learned on it is loaded"],
    slow: ["alarm", "Guard: adaptation does harm. Back to a good state; the source model answers meanwhile"],
    rest: ["alarm", "Guard: several alarms. The source model answers, and nothing is learned for a while"],
    trust: ["recall", "Guard: the adapted model answers again"],
    "one by one": ["shift", "Classes come in turn: images are normalised one by one"],
    "by batch": ["recall", "Classes are mixed again: images are normalised by the batch"],
    reset: ["done", "Reset to the source model"],
    freeze: ["done", "Frozen: it only predicts"],
    learn: ["done", "It learns again"],
  };
  const streams = new Map(); // name -> report
  const seen = { points: [], marks: [], pictures: [] }; // of the chosen stream
  let chosen = decodeURIComponent(location.hash.slice(1)) || null;
  let token = sessionStorage.getItem("mgtta-token");
  let range = "latest";
  let connection = null;
  let error = null; // of the estimated accuracy, in points

  // --- small helpers

  const percent = (x) => (x == null ? "–" : `${Math.round(100 * x)} %`);
  const whole = (x) => Math.round(x).toLocaleString("en");
  const few = (x) => (x == null ? "–" : x < 10 ? x.toFixed(1) : whole(x));
  const milliseconds = (x) => (x == null ? "–" : few(1000 * x));
  const several = (n, word) => `${whole(n || 0)} ${word}${n === 1 ? "" : "s"}`;

  function element(tag, className, ...children) {
    const made = document.createElement(tag);
    if (className) made.className = className;
    made.append(...children);
    return made;
  }

  function shape(tag, attributes, ...children) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
    Object.entries(attributes).forEach(([name, value]) => made.setAttribute(name, value));
    made.append(...children);
    return made;
  }

  // M x y L x y ..., with gaps where there is no value
  const path = (points) => points.reduce(([text, pen], [x, y]) => (y == null ? [text, "M"]
    : [`${text}${pen}${x.toFixed(1)} ${y.toFixed(1)}`, "L"]), ["", "M"])[0];

  // --- the connection

  const headers = () => (token ? { Authorization: `Bearer ${token}` } : {});

  function status(state, words) {
    $("status").dataset.state = state;
    $("status").textContent = words;
  }

  async function watch() {
    if (connection) connection.abort();
    const mine = new AbortController();
    connection = mine;
    while (connection === mine) {
      try {
        const query = chosen ? `?stream=${encodeURIComponent(chosen)}` : "";
        const reply = await fetch(`v1/live${query}`, { headers: headers(), signal: mine.signal });
        if (reply.status === 401) return askForToken();
        if (!reply.ok) throw new Error(`status ${reply.status}`);
        $("token").hidden = true;
        status("live", "live");
        await read(reply.body.getReader());
        throw new Error("the service has stopped");
      } catch (error) {
        if (connection !== mine) return;
        status("lost", "no connection: trying again");
        await new Promise((done) => setTimeout(done, 2000));
      }
    }
  }

  async function read(reader) {
    const decoder = new TextDecoder();
    let text = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += decoder.decode(value, { stream: true });
      const events = text.split("\n\n");
      text = events.pop();
      events.forEach(take);
    }
  }

  function take(event) {
    const [, kind, data] = event.match(/^event: (\w+)\ndata: (.*)$/s) || [];
    if (kind === "about") about(JSON.parse(data));
    if (kind === "streams") brief(JSON.parse(data));
    if (kind === "stream") full(JSON.parse(data));
    document.documentElement.dataset.ready = "1";
  }

  function askForToken() {
    status("waiting", "locked");
    $("wrong").hidden = !token;
    $("token").hidden = false;
    $("secret").focus();
  }

  $("token").addEventListener("submit", (event) => {
    event.preventDefault();
    token = $("secret").value.trim();
    sessionStorage.setItem("mgtta-token", token);
    watch();
  });

  // --- all streams

  const about = (service) => {
    error = service.error_points;
    $("about").textContent = `${service.model} with ${service.method} · version ${service.version}`;
  };

  function brief(changed) {
    changed.forEach((report) => streams.set(report.stream, report));
    const curl = `curl -sS --data-binary @picture.jpg ${location.origin}/v1/streams/camera-1/predict`;
    $("curl").textContent = curl;
    $("empty").hidden = streams.size > 0;
    $("overview").hidden = streams.size === 0;
    if (streams.size && !streams.has(chosen)) choose([...streams.keys()][0]);
    cards();
    detail();
  }

  const stateOf = (report) => (!report.loaded ? "saved" : report.frozen ? "frozen" : report.resting ? "source answers" : "learning");

  function cards() {
    const words = $("find").value.trim().toLowerCase();
    const found = [...streams.values()].filter((report) => report.stream.toLowerCase().includes(words))
      .sort((a, b) => Number(b.loaded) - Number(a.loaded) || a.stream.localeCompare(b.stream));
    $("find").hidden = streams.size <= 12;
    $("count").textContent = found.length > CARDS ? `${CARDS} of ${whole(found.length)}` : whole(found.length);
    const made = new Map([...$("cards").children].map((card) => [card.dataset.stream, card]));
    const wanted = found.slice(0, CARDS).map((report) => drawn(made.get(report.stream) || card(report.stream), report));
    const same = wanted.length === made.size && wanted.every((card, i) => card === $("cards").children[i]);
    if (!same) $("cards").replaceChildren(...wanted); // a card that stays keeps the focus
  }

  function card(name) {
    const made = element("button", "card");
    made.dataset.stream = name;
    made.addEventListener("click", () => choose(name));
    return made;
  }

  function drawn(made, report) {
    const state = stateOf(report);
    const chip = element("span", "chip", state);
    chip.dataset.state = state;
    const sure = element("span", "sure", percent(report.confidence), element("small", "", " sure"));
    const facts = [several(report.images, "image"), several(report.updates, "update"), several(report.shifts, "shift")];
    if (report.alarms) facts.push(several(report.alarms, "alarm"));
    made.replaceChildren(element("strong", "", report.stream), chip, sure, spark(report.spark || []),
      element("span", "quiet", facts.join(" · ")));
    made.setAttribute("aria-pressed", report.stream === chosen);
    return made;
  }

  function spark(values) {
    const least = Math.min(0.5, ...values.filter((value) => value != null));
    const points = values.map((value, i) => [(100 * i) / Math.max(values.length - 1, 1),
      value == null ? null : 30 - (28 * (value - least)) / (1 - least)]);
    return shape("svg", { viewBox: "0 0 100 32", preserveAspectRatio: "none", class: "adapted", "aria-hidden": "true" },
      shape("path", { class: "curve", d: path(points) }));
  }

  function choose(name) {
    const other = name !== chosen;
    chosen = name;
    history.replaceState(null, "", `#${encodeURIComponent(name)}`);
    if (other || !seen.points.length) forget();
    if (other) watch();
    cards();
    detail();
  }

  // --- the chosen stream

  const forget = () => { seen.points = []; seen.marks = []; seen.pictures = []; };

  function full(news) {
    if (news.stream !== chosen) return;
    if (news.fresh) forget();
    seen.points = [...seen.points, ...news.points].slice(-POINTS);
    seen.marks = [...seen.marks, ...news.marks].slice(-128);
    seen.pictures = [...seen.pictures, ...news.pictures].slice(-12);
    chart();
    happened();
    pictures();
  }

  function detail() {
    const report = streams.get(chosen);
    $("detail").hidden = !report;
    if (!report) return;
    const state = stateOf(report);
    $("name").textContent = report.stream;
    $("state").textContent = state;
    $("state").dataset.state = state;
    $("counts").textContent = [several(report.images, "image"), several(report.updates, "update"),
      several(report.shifts, "shift"), several(report.alarms, "alarm"),
      report.dropped ? `${whole(report.dropped)} not learned from` : ""].filter(Boolean).join(" · ");
    $("freeze").textContent = report.frozen ? "Learn again" : "Freeze";
    const estimate = ["estimated accuracy", percent(report.accuracy), error == null ? "" : `± ${Math.round(error)}`,
      `source model: ${percent(report.source_accuracy)}`];
    const tiles = [ // what, figure, unit, more
      ...(report.accuracy == null ? [] : [estimate]),
      ["sure of its answers", percent(report.confidence), "", `source model: ${percent(report.source_confidence)}`],
      ["agrees with the source", percent(report.agreement), "", "one image in eight"],
      ["entropy", report.entropy == null ? "–" : report.entropy.toFixed(2), "nats", "0: entirely sure"],
      ["images", few(report.images_per_second), "a second", "over the last 10 seconds"],
      ["time to an answer", milliseconds(report.latency_seconds), "ms", `99 % within ${milliseconds(report.late_seconds)} ms`],
    ];
    $("tiles").replaceChildren(...tiles.map(([what, figure, unit, more]) => element("div", "tile",
      element("span", "quiet", what), element("b", "", figure, element("small", "", ` ${unit}`)), element("span", "quiet", more))));
  }

  // --- the chart: panels one below the other, over the same images

  let scale = null; // what the pointer needs to know of the last drawing

  function chart() {
    const points = range === "all" ? seen.points : seen.points.slice(-LATEST);
    const box = $("chart");
    if (points.length < 2) {
      box.replaceChildren(element("p", "quiet", "The chart begins with the next images."));
      scale = null;
      return;
    }
    const width = box.clientWidth || 600;
    const left = 44;
    const first = points[0].image;
    const last = points.at(-1).image;
    const x = (image) => left + ((width - left - 8) * (image - first)) / Math.max(last - first, 1);
    const svg = shape("svg", { role: "img", "aria-label": "running figures over images" });
    let top = 40;
    const known = ({ curves }) => curves.some(([, key]) => points.some((point) => point[key] != null));
    PANELS.filter(known).forEach((panel) => { top = drawPanel(svg, panel, points, x, top, left, width); });
    const bottom = top - 22;
    drawMarks(svg, seen.marks.filter((mark) => mark.image >= first && mark.image <= last), x, bottom);
    svg.append(shape("text", { x: left, y: bottom + 18 }, `image ${whole(first)}`),
      shape("text", { x: width - 8, y: bottom + 18, "text-anchor": "end" }, whole(last)));
    svg.setAttribute("viewBox", `0 0 ${width} ${bottom + 24}`);
    box.replaceChildren(svg);
    scale = { points, x, bottom };
  }

  function drawPanel(svg, panel, points, x, top, left, width) {
    const values = panel.curves.flatMap(([, key]) => points.map((point) => point[key])).filter((value) => value != null);
    const most = panel.percent ? 1 : Math.max(0.5, Math.ceil(2 * Math.max(0, ...values)) / 2);
    const y = (value) => (value == null ? null : top + panel.height * (1 - value / most));
    [0, 0.5, 1].forEach((share) => {
      const at = y(share * most);
      const label = panel.percent ? percent(share) : (share * most).toFixed(1);
      svg.append(shape("line", { class: "grid", x1: left, x2: width - 8, y1: at, y2: at }),
        shape("text", { x: left - 6, y: at + 4, "text-anchor": "end" }, label));
    });
    svg.append(shape("text", { x: left, y: top - 9 }, panel.title));
    panel.curves.forEach(([name, key]) => {
      const curve = points.map((point) => [x(point.image), y(point[key])]);
      const known = curve.filter(([, at]) => at != null);
      if (name !== "source" && known.length > 1) {
        const area = `${path(known)}L${known.at(-1)[0]} ${y(0)}L${known[0][0]} ${y(0)}Z`;
        svg.append(shape("path", { class: `area ${name}`, d: area }));
      }
      svg.append(shape("path", { class: `curve ${name}`, d: path(curve) }));
    });
    return top + panel.height + 36;
  }

  function drawMarks(svg, marks, x, bottom) {
    let free = -Infinity; // where the next label has room
    marks.forEach((mark) => {
      const [kind] = WORDS[mark.kind] || ["done"];
      const at = x(mark.image);
      const drawn = shape("g", { class: `mark ${kind}`, "data-kind": mark.kind },
        shape("line", { x1: at, x2: at, y1: 14, y2: bottom - 14 }),
        shape("path", { d: `M${at - 4} 5h8l-4 8z` }));
      if (at > free) {
        const end = at > 0.85 * $("chart").clientWidth;
        drawn.append(shape("text", { x: end ? at - 8 : at + 8, y: 12, "text-anchor": end ? "end" : "start" }, mark.kind));
        free = at + 60;
      }
      svg.append(drawn);
    });
  }

  $("chart").addEventListener("pointermove", (event) => {
    if (!scale) return;
    const svg = $("chart").firstChild;
    const at = event.clientX - svg.getBoundingClientRect().left;
    const near = scale.points.reduce((a, b) => (Math.abs(scale.x(b.image) - at) < Math.abs(scale.x(a.image) - at) ? b : a));
    svg.querySelectorAll(".pointer").forEach((line) => line.remove());
    const place = scale.x(near.image);
    svg.append(shape("line", { class: "pointer", x1: place, x2: place, y1: 14, y2: scale.bottom - 14 }));
    const when = new Date(1000 * near.seconds).toLocaleTimeString();
    $("readout").textContent = [`image ${whole(near.image)}, ${when}`, `sure ${percent(near.confidence)}`,
      `source model ${percent(near.source_confidence)}`, `agreement ${percent(near.agreement)}`,
      `entropy ${near.entropy == null ? "–" : near.entropy.toFixed(2)}`, `${few(near.images_per_second)} images/s`].join(" · ");
  });

  // --- what happened, and the pictures

  function happened() {
    const items = seen.marks.slice(-40).reverse().map((mark) => {
      const [kind, words] = WORDS[mark.kind] || ["done", mark.kind];
      return element("li", kind, words, element("small", "", `image ${whole(mark.image)}`));
    });
    $("marks").replaceChildren(...(items.length ? items : [element("li", "", "Nothing yet: no shift, no alarm.")]));
  }

  function pictures() {
    $("shown").hidden = !seen.pictures.length;
    $("pictures").replaceChildren(...[...seen.pictures].reverse().map(({ image, thumbnail, before, after }) => {
      const changed = before.label !== after.label;
      const shown = element("img", "");
      shown.src = thumbnail;
      shown.alt = `image ${image}`;
      const labels = element("span", "", `${before.label} → `, element("b", "", after.label));
      const sures = element("span", "", `${Math.round(100 * before.probability)} → ${percent(after.probability)}`);
      const made = element("figure", changed ? "picture changed" : "picture", shown, labels, sures);
      made.title = `image ${whole(image)}: source model ${before.label}, adapted ${after.label}`;
      return made;
    }));
  }

  // --- controls

  async function command(path) {
    const reply = await fetch(`v1/streams/${encodeURIComponent(chosen)}/${path}`, { method: "POST", headers: headers() });
    if (!reply.ok) status("lost", `refused: status ${reply.status}`);
  }

  $("freeze").addEventListener("click", () => command(`freeze?frozen=${!streams.get(chosen).frozen}`));
  let sure = null;
  $("reset").addEventListener("click", () => {
    if (sure) {
      clearTimeout(sure);
      command("reset");
    }
    $("reset").textContent = sure ? "Reset" : "Forget what was learned?";
    sure = sure ? null : setTimeout(() => { sure = null; $("reset").textContent = "Reset"; }, 4000);
  });
  $("find").addEventListener("input", cards);
  $("range").addEventListener("click", (event) => {
    if (!event.target.dataset.range) return;
    range = event.target.dataset.range;
    [...$("range").children].forEach((button) => button.setAttribute("aria-pressed", button === event.target));
    chart();
  });
  addEventListener("hashchange", () => choose(decodeURIComponent(location.hash.slice(1))));
  new ResizeObserver(chart).observe($("chart"));

  const names = { adapted: "adapted model", source: "source model", agreement: "agreement", entropy: "entropy" };
  $("legend").replaceChildren(...Object.entries(names).map(([kind, words]) => element("span", kind, words)));
  watch();
})();
