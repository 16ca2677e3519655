// Brings the pictures of a page to life without a kernel: plotly figures, and replays of the live widgets.
// A replay is a list of frames. This file owns the controls, the caption and the table; the picture is drawn by
// plotly, or by the very module that draws it in JupyterLab.
(() => {
  "use strict";
  const base = new URL(".", document.currentScript.src).href;
  const PACE_MS = 600; // a frame must be read, not only seen
  const loaded = {};

  function script(name) {
    loaded[name] ??= new Promise((resolve, reject) => {
      const tag = document.createElement("script");
      tag.src = base + name;
      tag.onload = resolve;
      tag.onerror = () => reject(new Error(`${name} is missing: build the book again`));
      document.head.append(tag);
    });
    return loaded[name];
  }

  function make(tag, attributes = {}, ...children) {
    const node = document.createElement(tag);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.append(...children);
    return node;
  }

  // ------------------------------------------------------------------------------------------------- the controls

  // show(i) draws frame i; captions(i) says the same in words, a paragraph a picture; tables(i): [name, rows] a picture.
  // start: the frame shown first. of: moments of the recording, if the replay shows fewer.
  function controls(host, { label, count, start = 0, of = count, captions, tables, show }) {
    const slider = make("input", { type: "range", min: 0, max: count - 1, step: 1, value: 0, "aria-label": `${label}: step` });
    const back = make("button", { type: "button", "aria-label": "step back", title: "step back" }, "◀");
    const play = make("button", { type: "button", "aria-label": "play", title: "play" }, "▶ play");
    const next = make("button", { type: "button", "aria-label": "step forward", title: "step forward" }, "▶");
    const place = make("output", { "aria-hidden": "true" });
    const caption = make("div", { role: "status", "aria-live": "polite", class: "player-caption" });
    const rows = make("div", { class: "player-table" });
    const details = make("details", {}, make("summary", {}, "View as table"), rows);
    let timer = null;

    function seek(wanted) {
      const i = Math.max(0, Math.min(count - 1, wanted));
      slider.value = i;
      place.textContent = `${i + 1} / ${count}`;
      slider.setAttribute("aria-valuetext", `${i + 1} of ${count}`);
      caption.replaceChildren(...captions(i).filter(Boolean).map((text) => make("p", {}, text)));
      back.disabled = i === 0;
      next.disabled = i === count - 1;
      if (details.open) fill();
      show(i);
    }
    const now = () => Number(slider.value);

    function fill() {
      const row = (tag, cells, extra) => make("tr", {}, ...cells.map((x) => make(tag, extra, String(x))));
      const all = tables(now());
      rows.replaceChildren(...all.map(([name, [head, ...body]]) =>
        make("table", { "aria-label": name }, ...(all.length > 1 ? [make("caption", {}, name)] : []),
          make("thead", {}, row("th", head, { scope: "col" })), make("tbody", {}, ...body.map((cells) => row("td", cells))))));
    }

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "▶ play";
      play.setAttribute("aria-label", "play");
    }
    function toggle() {
      if (timer) return stop();
      if (now() === count - 1) seek(0);
      play.textContent = "❚❚ pause";
      play.setAttribute("aria-label", "pause");
      timer = setInterval(() => {
        seek(now() + 1);
        if (now() === count - 1) stop();
      }, PACE_MS);
    }

    slider.addEventListener("input", () => { stop(); seek(now()); });
    back.addEventListener("click", () => { stop(); seek(now() - 1); });
    next.addEventListener("click", () => { stop(); seek(now() + 1); });
    play.addEventListener("click", toggle);
    details.addEventListener("toggle", () => details.open && fill());

    const bar = make("div", { class: "player-controls" }, back, play, next, slider, place);
    bar.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: now() - 1, ArrowRight: now() + 1, Home: 0, End: count - 1 };
      if (event.key === " " && event.target === slider) toggle();
      else if (event.key in moves) { stop(); seek(moves[event.key]); slider.focus(); }
      else return;
      event.preventDefault(); // otherwise the range moves a second time, or the page scrolls
    });
    host.setAttribute("role", count > 1 ? "group" : "figure");
    host.setAttribute("aria-label", count > 1 ? `${label}, replay of ${count} steps` : label);
    if (count > 1) host.prepend(bar);
    host.append(caption);
    if (of > count) host.append(make("p", { class: "player-note" }, `${count} of the recording's ${of} moments are shown here.`));
    if (tables(0).length) host.append(details);
    seek(start);
  }

  // ------------------------------------------------------------------------------------------- replays of widgets

  // As much of an anywidget model as a module needs that only draws.
  class Model {
    constructor(traits) { this.traits = { ...traits }; this.listeners = {}; }
    get(name) { return this.traits[name]; }
    set(name, value) {
      this.traits[name] = value;
      for (const heard of [`change:${name}`, "change"]) (this.listeners[heard] ?? []).forEach((f) => f());
    }
    on(names, f) { for (const name of names.split(" ")) (this.listeners[name] ??= []).push(f); }
    off(name, f) { this.listeners[name] = (this.listeners[name] ?? []).filter((g) => f && g !== f); }
    save_changes() {}
    send() {}
  }

  async function renderer(name) {
    await script("widgets.js");
    const source = window.tinymoeWidgets[name];
    if (!source) throw new Error(`no widget module called ${name}`);
    const url = URL.createObjectURL(new Blob([source], { type: "text/javascript" }));
    try { return (await import(url)).default; } finally { URL.revokeObjectURL(url); }
  }

  // One replay may hold several pictures that move together (`more`).
  async function replay(host, data) {
    const parts = [data, ...(data.more ?? [])];
    const models = [];
    for (const part of parts) {
      const picture = make("div", { class: "player-picture" });
      const model = new Model({ label: part.label, selection: "", ...part.traits, frame: part.frames[0] });
      host.append(picture);
      await (await renderer(part.esm)).render({ model, el: picture });
      models.push(model);
    }
    controls(host, { label: parts.map((p) => p.label).join(" and "), count: data.frames.length, of: data.of, start: data.start,
      captions: (i) => parts.map((p) => p.captions?.[i]),
      tables: (i) => parts.filter((p) => p.tables).map((p) => [p.label, p.tables[i]]),
      show: (i) => models.forEach((model, n) => model.set("frame", parts[n].frames[i])) });
  }

  // --------------------------------------------------------------------------------------------- plotly figures

  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  const title = (layout) => (typeof layout?.title === "string" ? layout.title : layout?.title?.text) ?? "";

  // The page's own colours, so that a figure can be read by day and by night.
  function dressed(layout) {
    const line = color("--pst-color-border");
    const look = { ...layout, paper_bgcolor: "transparent", plot_bgcolor: "transparent", autosize: true,
      font: { family: "inherit", ...layout.font, color: color("--pst-color-text-base") } };
    look.margin = { l: 48, r: 16, t: title(layout) ? 44 : 16, b: 40, ...layout.margin };
    const bar = layout.sliders?.[0];
    if (bar?.y < 0 && layout.height) { // plotly's own slider lies in the lower margin: take back the room for it
      const inner = layout.height - (layout.margin.t ?? 0) - look.margin.b;
      const excess = look.margin.b + Math.round(bar.y * inner);
      look.margin.b -= excess;
      look.height -= excess;
    }
    delete look.width; delete look.sliders; delete look.updatemenus;
    for (const name of new Set(["xaxis", "yaxis", ...Object.keys(layout).filter((k) => /^[xy]axis\d*$/.test(k))]))
      look[name] = { gridcolor: line, zerolinecolor: line, linecolor: line, automargin: true, ...layout[name] };
    return look;
  }

  // The numbers of a figure: [name, rows] a table. Curves and bars over the same places share one, a column each.
  function tablesOf(traces, layout, label) {
    const found = new Map();
    for (const [n, trace] of traces.entries()) {
      if (trace.type === "heatmap")
        found.set(n, [["", ...trace.x], ...trace.y.map((name, r) => [name, ...(trace.text ?? trace.z)[r]])]);
      else if (trace.type === "sankey") {
        const { source, target, value } = trace.link, name = trace.node.label;
        found.set(n, [["from", "to", "width"], ...source.map((s, i) => [name[s], name[target[i]], value[i]])]);
      } else {
        const [places, values] = trace.orientation === "h" ? [trace.y, trace.x] : [trace.x, trace.y];
        if (!Array.isArray(values)) continue;
        const key = JSON.stringify([trace.xaxis, trace.yaxis, places]);
        if (!found.has(key)) found.set(key, [[""], ...values.map((_, i) => [places?.[i] ?? i])]);
        const rows = found.get(key);
        rows[0].push(trace.name ?? "value");
        values.forEach((value, i) => rows[i + 1].push(value));
      }
    }
    const titles = (layout?.annotations ?? []).map((a) => a.text); // of subplots, in their order
    return [...found.values()].map((rows, n) => [titles.length === found.size ? titles[n] : label, rows]);
  }

  async function figure(host, data) {
    await script("plotly.min.js");
    const picture = make("div", { class: "player-picture" });
    host.append(picture);
    const frames = data.frames ?? [];
    let shown = 0;
    const tracesOf = (frame) => data.data.map((trace, t) => {
      const at = frame.traces ? frame.traces.indexOf(t) : t;
      return { ...trace, ...(at >= 0 ? frame.data?.[at] : undefined) };
    });
    function draw(i) {
      shown = i;
      const frame = frames[i] ?? {};
      const traces = tracesOf(frame);
      const layout = { ...data.layout, ...frame.layout };
      if (frames.length) { // the title is the caption, below the picture
        delete layout.title;
        layout.margin = { ...layout.margin, t: Math.min(layout.margin?.t ?? 24, 24) };
      }
      window.Plotly.react(picture, traces, dressed(layout), { responsive: true, displayModeBar: false, ...data.config });
    }
    const label = data.layout?.meta?.label ?? (title(data.layout) || "figure");
    controls(host, { label, count: Math.max(frames.length, 1), start: data.layout?.sliders?.[0]?.active,
      captions: (i) => [title(frames[i]?.layout)], show: draw,
      tables: (i) => tablesOf(tracesOf(frames[i] ?? {}), data.layout, label) });
    new MutationObserver(() => draw(shown)).observe(document.documentElement, { attributeFilter: ["data-theme"] });
  }

  // ------------------------------------------------------------------------------------------------------ start

  function start() {
    for (const host of document.querySelectorAll(".player")) {
      const data = JSON.parse(host.querySelector("script").textContent);
      const kind = host.classList.contains("player-plotly") ? figure : replay;
      kind(host, data).catch((error) => host.append(make("p", { class: "player-error", role: "alert" }, String(error))));
    }
  }
  if (document.readyState === "loading") document.addEventListener("DOMContentLoaded", start);
  else start();
})();
