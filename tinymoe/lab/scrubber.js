// The controls of every widget: scrub, step, play, jump to the next decision, step the live engine, ask why, see a table.
// Native elements with labels; ← → step, Space plays, Home and End jump. The kernel answers with caption, why and table.
const h = (tag, attrs = {}, ...kids) => {
  const e = Object.assign(document.createElement(tag), { onclick: attrs.onclick ?? null });
  for (const k in attrs) if (k !== "onclick" && attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids);
  return e;
};
const PACE_MS = 250; // a plotly figure draws 10 to 20 frames a second; 4 can be followed
const WAIT_MS = 2000; // a busy kernel must not pile up frames that it will draw later

const STYLE = `
.tm-scrub { --fg: var(--jp-content-font-color1, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8)));
  --bg: var(--jp-layout-color0, var(--vscode-editor-background, light-dark(#fff, #121212))); --line: color-mix(in srgb, var(--fg) 45%, var(--bg));
  color: var(--fg); font: 13px/1.4 system-ui, sans-serif; padding: 4px; max-width: 900px; }
.tm-scrub .bar { display: flex; flex-wrap: wrap; gap: 6px; align-items: center; }
.tm-scrub button { font: inherit; color: inherit; background: color-mix(in srgb, var(--fg) 7%, var(--bg)); border: 1px solid var(--line); border-radius: 5px; padding: 3px 10px; cursor: pointer; }
.tm-scrub button:hover:enabled { background: color-mix(in srgb, var(--fg) 15%, var(--bg)); } .tm-scrub button:disabled { opacity: .55; cursor: default; }
.tm-scrub button[aria-expanded=true] { background: color-mix(in srgb, var(--fg) 20%, var(--bg)); }
.tm-scrub .live button { border-color: #009e73; border-width: 2px; } .tm-scrub .live { display: flex; gap: 6px; }
.tm-scrub input { flex: 1 1 160px; min-width: 120px; accent-color: #0072b2; margin: 4px 2px; } .tm-scrub output { min-width: 74px; font-variant-numeric: tabular-nums; }
.tm-scrub :focus-visible { outline: 3px solid #56b4e9; outline-offset: 1px; }
.tm-scrub [role=status] { margin: 7px 0 3px; font-size: 14px; min-height: 1.4em; }
.tm-scrub .more { overflow-x: auto; margin: 4px 0; } .tm-scrub .more:empty { display: none; }
.tm-scrub table { border-collapse: collapse; font-variant-numeric: tabular-nums; } .tm-scrub td, .tm-scrub th { border: 1px solid var(--line); padding: 2px 8px; text-align: left; }
.tm-scrub ol { margin: 2px 0; padding-left: 24px; } .tm-scrub code { display: block; font: 12px ui-monospace, monospace; white-space: pre-wrap; color: var(--fg); background: color-mix(in srgb, var(--fg) 7%, var(--bg)); padding: 2px 6px; border-radius: 3px; }
.tm-plot { --fg: var(--jp-content-font-color1, var(--vscode-editor-foreground, #1b1b1b)); max-width: 100%; }
.tm-plot .main-svg { background: transparent !important; } .tm-plot rect.bg { fill: transparent !important; fill-opacity: 0 !important; }
.tm-plot :is(.xtick, .ytick, .cbaxis, .infolayer, .node-label) text, .tm-plot text:is(.xtitle, .ytitle, .node-label) { fill: var(--fg) !important; text-shadow: none !important; }`;

export default {
  render({ model, el }) {
    let timer = null, asked = 0;
    const get = (k) => model.get(k);
    const put = (k, v) => { model.set(k, v); model.save_changes(); };
    const last = () => Math.max(0, get("count") - 1);
    const seek = (i) => put("at", Math.max(0, Math.min(last(), i)));
    const press = (label, title, onclick) => h("button", { type: "button", "aria-label": title, title, onclick }, label);
    const back = press("◂ back", "step back", () => { stop(); seek(get("at") - 1); });
    const play = press("▶ play", "play", () => (timer ? stop() : start()));
    const next = press("step ▸", "step forward", () => { stop(); seek(get("at") + 1); });
    const jump = press("decision »", "next decision", () => { stop(); const to = get("decisions").find((d) => d > get("at")); if (to !== undefined) seek(to); });
    const slider = h("input", { type: "range", min: 0, step: 1 });
    const place = h("output", { "aria-hidden": "true" });
    const engine = press("step engine", "let the engine run one step", () => model.send({ do: "step" }));
    const run = press("run engine", "run the engine", () => put("running", !get("running")));
    const live = h("span", { class: "live" }, engine, run);
    const caption = h("p", { role: "status", "aria-live": "polite" });
    const why = press("why?", "why did this happen?", () => put("show_why", !get("show_why")));
    const tab = press("table", "view as table", () => put("show_table", !get("show_table")));
    const reasons = h("div", { class: "more" }), table = h("div", { class: "more" });
    const bar = h("div", { class: "bar" }, back, play, next, jump, slider, place, live, why, tab);
    const root = h("div", { class: "tm-scrub", role: "group", "data-lm-suppress-shortcuts": "true" }, h("style", {}, STYLE), bar, caption, reasons, table);

    function stop() {
      clearInterval(timer);
      timer = null;
      play.textContent = "▶ play";
      play.setAttribute("aria-label", "play");
    }
    function start() {
      if (get("at") >= last()) seek(0);
      play.textContent = "❚❚ pause";
      play.setAttribute("aria-label", "pause");
      // The kernel says which frame it has drawn (`drawn`); the next one is asked for only then.
      timer = setInterval(() => {
        if (get("at") >= last()) stop();
        else if (get("drawn") === get("at") || Date.now() - asked > WAIT_MS) { asked = Date.now(); seek(get("at") + 1); }
      }, PACE_MS);
    }
    slider.addEventListener("input", () => { stop(); seek(Number(slider.value)); });
    root.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: get("at") - 1, ArrowRight: get("at") + 1, Home: 0, End: last() }[event.key];
      if (event.key === " " && event.target.tagName !== "BUTTON") timer ? stop() : start();
      else if (to === undefined) return;
      else { stop(); seek(to); }
      event.preventDefault(); // or the range moves twice, the page scrolls, or the notebook takes the key
      event.stopPropagation();
    });

    function draw() {
      const [at, count, label] = [get("at"), get("count"), get("label")];
      root.setAttribute("aria-label", label);
      Object.assign(slider, { max: last(), value: at, disabled: count < 2 });
      slider.setAttribute("aria-label", `${label}: moment`);
      slider.setAttribute("aria-valuetext", count ? `${at + 1} of ${count}` : "none yet");
      place.textContent = count ? `${at + 1} / ${count}` : "0 / 0";
      [back.disabled, next.disabled, play.disabled] = [at <= 0, at >= last(), count < 2];
      jump.hidden = !get("decisions").length;
      jump.disabled = !get("decisions").some((d) => d > at);
      live.hidden = !get("live");
      live.style.display = get("live") ? "" : "none";
      engine.disabled = get("running");
      run.textContent = get("running") ? "pause engine" : "run engine";
      run.setAttribute("aria-label", get("running") ? "pause the engine" : "run the engine");
      if (caption.textContent !== get("caption")) caption.textContent = get("caption");
      why.setAttribute("aria-expanded", get("show_why"));
      tab.setAttribute("aria-expanded", get("show_table"));
      reasons.replaceChildren(...(get("show_why") ? [h("ol", {}, ...get("why").map(([words, line]) => h("li", {}, words, h("code", {}, line))))] : []));
      const [head = [], ...rows] = get("show_table") ? get("table") : [];
      table.replaceChildren(...(head.length ? [h("table", {}, h("thead", {}, h("tr", {}, ...head.map((x) => h("th", { scope: "col" }, String(x))))),
        h("tbody", {}, ...rows.map((r) => h("tr", {}, ...r.map((x) => h("td", {}, String(x)))))))] : []));
    }
    draw();
    model.on("change", draw);
    el.append(root);
    return () => { stop(); model.off("change", draw); };
  },
};
