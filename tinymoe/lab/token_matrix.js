// The causal attention matrix, one panel for each run: what this step computes, and what it reads from the cache. Draws
// model.get("frame"), made by tinymoe.lab.widgets.lessons.matrix; runs under anywidget in JupyterLab and, with a stand-in for the
// model, in a static page.
const make = (space) => (tag, attrs = {}, ...kids) => {
  const e = document.createElementNS(space, tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const h = make("http://www.w3.org/1999/xhtml"), svg = make("http://www.w3.org/2000/svg");
const LEFT = 66, TOP = 20;

const STYLE = `
.tm-matrix { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 40%, var(--bg));
  color: var(--fg); font: 13px/1.35 system-ui, sans-serif; padding: 4px; }
.tm-matrix .panels { display: flex; flex-wrap: wrap; gap: 12px 28px; overflow-x: auto; }
.tm-matrix figure { margin: 0; } .tm-matrix figcaption { color: var(--fg); font: 600 13px/1.35 system-ui, sans-serif; text-align: left; margin: 0 0 2px; padding-left: ${LEFT}px; }
.tm-matrix figcaption small { font-size: 12px; font-weight: 400; color: var(--dim); }
.tm-matrix svg { display: block; } .tm-matrix text { fill: var(--fg); font: 10px ui-monospace, monospace; white-space: pre; }
.tm-matrix text.dim { fill: var(--dim); }
.tm-matrix .old { fill: none; stroke: var(--line); }
.tm-matrix .new { fill: #0072b2; stroke: var(--bg); }
.tm-matrix .read { fill: url(#tm-read); stroke: #e69f00; }
.tm-matrix .key { color: var(--dim); font-size: 12px; margin: 6px 0 0; }
.tm-matrix .key i { display: inline-block; width: 11px; height: 11px; vertical-align: -1px; margin: 0 4px 0 10px; box-sizing: border-box; }
.tm-matrix i.new { background: #0072b2; } .tm-matrix i.old { border: 1px solid var(--line); }
.tm-matrix i.read { border: 1px solid #e69f00; background: repeating-linear-gradient(135deg, #e69f00 0 2px, var(--bg) 2px 4px); }`;

function panel([name, start, stop], words, size) {
  const CELL = size > 16 ? 11 : 13, side = size * CELL, tree = svg("svg", { width: LEFT + side + 4, height: TOP + side + 4, role: "img",
    "aria-label": `${name}: rows ${start} to ${stop - 1} are computed` + (start ? `, keys 0 to ${start - 1} come from the cache` : "") });
  tree.append(svg("defs", {}, svg("pattern", { id: "tm-read", width: 4, height: 4, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    svg("line", { y2: 4, style: "stroke:#e69f00;stroke-width:4" }))));
  for (let c = 0; c < size; c += 5) tree.append(svg("text", { class: "dim", x: LEFT + (c + 0.5) * CELL, y: TOP - 6, "text-anchor": "middle" }, String(c)));
  for (let r = 0; r < stop; r++) {
    const now = r >= start, word = [...JSON.stringify(words[r] ?? "").slice(1, -1)].slice(0, 9).join("");
    tree.append(svg("text", { class: now ? null : "dim", x: LEFT - 6, y: TOP + (r + 0.8) * CELL, "text-anchor": "end", "font-weight": now ? 700 : 400 }, word || String(r)));
    for (let c = 0; c <= r; c++)
      tree.append(svg("rect", { class: now ? (c < start ? "read" : "new") : "old", x: LEFT + c * CELL + 1, y: TOP + r * CELL + 1, width: CELL - 2, height: CELL - 2 }));
  }
  return h("figure", {}, h("figcaption", {}, `${name} `, h("small", {}, `${stop - start} of ${stop} rows`)), tree);
}

export default {
  render({ model, el }) {
    const draw = () => {
      const frame = model.get("frame");
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-matrix" },
        h("div", { class: "panels" }, ...frame.panels.map((p) => panel(p, frame.words, frame.size))),
        h("p", { class: "key" }, "Row: a token that asks. Column: a token that answers.", h("i", { class: "new" }), "computed in this step",
          h("i", { class: "read" }), "the key comes from the cache", h("i", { class: "old" }), "an earlier step's work, not done again")));
    };
    draw();
    model.on("change:frame", draw);
  },
};
