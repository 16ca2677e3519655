// Rows of small boxes in panels. Draws model.get("frame"), made by tinymoe.lab.widgets.lessons.grouping and .touches; runs
// under anywidget in JupyterLab and, with a stand-in for the model, in a static page. A box is "KTEXT", K its kind. In
// ["KTEXT"] the first line of the text is an id: that box is a thing which may lie elsewhere in the next frame, and glides there.
const h = (tag, attrs = {}, ...kids) => {
  const e = document.createElement(tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const KINDS = { ".": "plain", n: "now", s: "put", d: "done", e: "gap", r: "room", "!": "clash" };
const GLIDE_MS = 350;

const STYLE = `
.tm-cells { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 40%, var(--bg)); --blue: #0072b2; --red: #d55e00;
  color: var(--fg); font: 12px/1.25 system-ui, sans-serif; padding: 4px; overflow-x: auto; }
.tm-cells .panels { display: flex; gap: 12px 28px; flex-wrap: wrap; align-items: flex-start; } .tm-cells .panel { min-width: 0; }
.tm-cells .title { color: var(--dim); margin: 0 0 4px; } .tm-cells .line { display: flex; align-items: center; margin-bottom: 2px; }
.tm-cells .label { white-space: pre; font-family: ui-monospace, monospace; flex: none; overflow: hidden; padding-right: 6px; box-sizing: border-box; }
.tm-cells .box { flex: none; box-sizing: border-box; text-align: center; border: 1px solid var(--line); margin-right: 2px; font: 11px/1.2 ui-monospace, monospace; white-space: pre; overflow: hidden; display: flex; align-items: center; justify-content: center; }
.tm-cells .done { background: color-mix(in srgb, var(--fg) 12%, var(--bg)); } .tm-cells .gap { border-style: dashed; color: var(--dim); }
.tm-cells .room { border-style: dotted; background: repeating-linear-gradient(135deg, color-mix(in srgb, var(--line) 45%, var(--bg)) 0 1px, var(--bg) 1px 5px); color: var(--dim); }
.tm-cells .now { border: 2px solid var(--blue); font-weight: 700; } .tm-cells .put { border: 2px solid var(--blue); background: color-mix(in srgb, var(--blue) 22%, var(--bg)); font-weight: 700; }
.tm-cells .clash { border: 2px dashed var(--red); font-weight: 700; } .tm-cells .mine { outline: 3px solid var(--red); outline-offset: -1px; } .tm-cells .box[data-id] { cursor: pointer; }
.tm-cells .key { color: var(--dim); margin: 6px 0 0; } .tm-cells .key .box { display: inline-flex; width: 14px; height: 14px; vertical-align: -3px; margin: 0 4px 0 10px; }
.tm-cells select { font: inherit; color: inherit; background: var(--bg); border: 1px solid var(--line); } .tm-cells option { color: #1b1b1b; background: #fff; }`;

function box(cell, frame, mine) {
  const thing = Array.isArray(cell), said = thing ? cell[0] : cell, id = thing ? said.slice(1).split("\n")[0] : null, [wide, high] = frame.size;
  const kind = KINDS[said[0]] + (id != null && id === mine ? " mine" : "");
  return h("div", { class: `box ${kind}`, "data-id": id, style: `width:${wide}px;height:${high}px` }, said.slice(1));
}

export default {
  render({ model, el }) {
    let mine; // the reader's choice; at first it is the frame's
    const picture = h("div", { class: "panels", role: "img" }), key = h("p", { class: "key" }), menu = h("select"), follow = h("label", {}, "follow ", menu);
    const still = () => window.matchMedia("(prefers-reduced-motion: reduce)").matches;
    const where = () => new Map([...picture.querySelectorAll(".box[data-id]")].map((b) => [b.dataset.id, b.getBoundingClientRect()]));
    function draw() {
      const frame = model.get("frame"), origin = picture.getBoundingClientRect(), before = where();
      mine ??= frame.follow ?? null;
      picture.setAttribute("aria-label", frame.label);
      picture.replaceChildren(...frame.panels.map(({ title, label, rows }) => h("div", { class: "panel" }, h("p", { class: "title" }, title),
        ...rows.map(([name, cells]) => h("div", { class: "line" }, label ? h("div", { class: "label", style: `width:${label}px` }, name) : null, ...cells.map((c) => box(c, frame, mine)))))));
      key.replaceChildren(...frame.key.flatMap(([kind, words]) => [h("span", { class: `box ${KINDS[kind]}` }), words]));
      follow.hidden = !frame.things;
      if (frame.things && !menu.options.length) for (let n = 0; n < frame.things[1]; n++) menu.append(h("option", { value: n }, `${frame.things[0]} ${n}`));
      if (mine != null) menu.value = mine;
      if (still()) return;
      const now = picture.getBoundingClientRect();
      for (const b of picture.querySelectorAll(".box[data-id]")) {
        const old = before.get(b.dataset.id), rect = b.getBoundingClientRect();
        if (!old) continue;
        const [dx, dy] = [old.x - origin.x - (rect.x - now.x), old.y - origin.y - (rect.y - now.y)];
        if (Math.hypot(dx, dy) > 1) b.animate([{ transform: `translate(${dx}px,${dy}px)` }, { transform: "none" }], { duration: GLIDE_MS, easing: "ease-out" });
      }
    }
    const choose = (id) => { mine = id; draw(); };
    menu.addEventListener("change", () => choose(menu.value));
    picture.addEventListener("click", (event) => { const b = event.target.closest(".box[data-id]"); if (b) choose(b.dataset.id); });
    el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-cells" }, picture, key, follow));
    draw();
    model.on("change:frame", draw);
  },
};
