// W5: the prefix index as a tree, from the start of a prompt (left) to its end. Draws model.get("frame"), made by
// tinymoe.lab.frames.prefix; runs under anywidget in JupyterLab and, with a stand-in for the model, in a static page.
const make = (space) => (tag, attrs = {}, ...kids) => {
  const e = document.createElementNS(space, tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const h = make("http://www.w3.org/1999/xhtml"), svg = make("http://www.w3.org/2000/svg");
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"]; // Okabe-Ito, one for each salt
const letters = (n) => (n < 26 ? "" : letters(Math.floor(n / 26) - 1)) + String.fromCharCode(65 + (n % 26));
const W = 50, H = 34, DX = 72, DY = 46, TOP = 26;

const STYLE = `
.tm-tree { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 45%, var(--bg));
  color: var(--fg); font: 13px/1.3 system-ui, sans-serif; padding: 4px; }
.tm-tree .scroll { overflow: auto; max-width: 100%; max-height: 460px; }
.tm-tree svg { display: block; } .tm-tree text { fill: var(--fg); font: 600 13px system-ui, sans-serif; text-anchor: middle; }
.tm-tree text.small { font: 10.5px system-ui, sans-serif; } .tm-tree text.dim { fill: var(--dim); font: 11px system-ui, sans-serif; }
.tm-tree text.salt { text-anchor: end; font: 600 12px system-ui, sans-serif; }
.tm-tree rect.box { fill: color-mix(in srgb, var(--c) 22%, var(--bg)); stroke: var(--c); stroke-width: 2; transition: fill .15s; }
.tm-tree .kept rect.box { fill: url(#tm-hatch); stroke-dasharray: 5 3; }
.tm-tree .now rect.box { stroke: var(--fg); stroke-width: 3.5; } .tm-tree .now circle { fill: var(--fg); }
.tm-tree path { fill: none; stroke: var(--line); stroke-width: 2; } .tm-tree path.now { stroke: var(--fg); stroke-width: 3.5; }
.tm-tree [role=treeitem] { cursor: pointer; outline: none; } .tm-tree [role=treeitem]:focus-visible rect.box { stroke: #56b4e9; stroke-width: 5; }
.tm-tree .key { color: var(--dim); font-size: 12px; margin: 6px 0 0; }
@media (prefers-reduced-motion: reduce) { .tm-tree * { transition: none !important; } }`;

function node(place, [block, , salt, depth, , owners], now, salts) {
  const [x, y] = place, names = owners.map(letters);
  const short = names.length > 2 ? `${names[0]}+${names.length - 1}` : names.join("+");
  const who = names.length ? `owned by ${names.join(" and ")}` : "cached, no owner";
  const label = `block ${block}, ${who}${salts > 1 ? `, salt ${salt + 1}` : ""}${now ? ", touched now" : ""}`;
  return svg("g", { role: "treeitem", tabindex: -1, class: `${names.length ? "" : "kept"}${now ? " now" : ""}`, style: `--c:${HUES[salt % HUES.length]}`,
      "aria-level": depth + 1, "aria-label": label, "data-block": block, transform: `translate(${x},${y})` },
    svg("title", {}, label), svg("rect", { class: "box", width: W, height: H, rx: 6 }),
    svg("text", { x: W / 2, y: 15 }, String(block)), svg("text", { class: "small", x: W / 2, y: 28 }, short || "kept"),
    now ? svg("circle", { cx: W - 7, cy: 8, r: 3.5 }) : null);
}

export default {
  render({ model, el }) {
    const draw = () => {
      const frame = model.get("frame"), touched = new Set(frame.touched);
      const again = el.contains(document.activeElement) ? document.activeElement.dataset.block : undefined;
      const left = frame.salts > 1 ? 58 : 6;
      const at = new Map(frame.nodes.map((n) => [n[0], [left + n[3] * DX, TOP + n[4] * DY]]));
      const deepest = Math.max(0, ...frame.nodes.map((n) => n[3])), lanes = 1 + Math.max(0, ...frame.nodes.map((n) => n[4]));
      const size = { width: left + deepest * DX + W + 8, height: TOP + lanes * DY };
      const tree = svg("svg", { ...size, viewBox: `0 0 ${size.width} ${size.height}`, role: "tree", "aria-label": `prefix index, step ${frame.step}` },
        svg("defs", {}, svg("pattern", { id: "tm-hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
          svg("line", { y2: 7, style: "stroke:color-mix(in srgb, var(--fg) 26%, var(--bg));stroke-width:4" }))));
      if (frame.nodes.length) for (let d = 0; d <= deepest; d++)
        tree.append(svg("text", { class: "dim", x: left + d * DX + W / 2, y: 14, "aria-hidden": "true" }, `page ${d}`));
      for (const [block, parent, salt] of frame.nodes) {
        const [x, y] = at.get(block);
        if (at.has(parent)) {
          const [px, py] = at.get(parent), mid = px + W + (DX - W) / 2;
          tree.append(svg("path", { class: touched.has(block) && touched.has(parent) ? "now" : null, d: `M${px + W} ${py + H / 2}H${mid}V${y + H / 2}H${x}` }));
        } else if (frame.salts > 1) tree.append(svg("text", { class: "salt", x: x - 8, y: y + 21, "aria-hidden": "true" }, `salt ${salt + 1}`));
      }
      for (const n of frame.nodes) tree.append(node(at.get(n[0]), n, touched.has(n[0]), frame.salts));
      const items = [...tree.querySelectorAll("[role=treeitem]")];
      const select = (e) => { if (e) { model.set("selection", `block ${e.dataset.block}`); model.save_changes(); } };
      if (items.length) items[0].setAttribute("tabindex", 0);
      tree.addEventListener("click", (event) => select(event.target.closest("[role=treeitem]")));
      tree.addEventListener("keydown", (event) => {
        const i = items.indexOf(document.activeElement);
        const to = { ArrowDown: i + 1, ArrowUp: i - 1, ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: items.length - 1 }[event.key];
        if (event.key === "Enter" || event.key === " ") select(items[i]);
        else if (to === undefined) return;
        else if (items[to]) { items[i].setAttribute("tabindex", -1); items[to].setAttribute("tabindex", 0); items[to].focus(); }
        event.preventDefault();
        event.stopPropagation();
      });
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-tree", "data-lm-suppress-shortcuts": "true" },
        h("div", { class: "scroll" }, frame.nodes.length ? tree : h("p", { class: "key" }, "The index is empty.")),
        h("p", { class: "key" }, "Each box is a full block: its number, and its owners. Dashed and hatched, “kept”: no owner, but still findable. ●: touched at this moment.",
          frame.salts > 1 ? " One colour for each salt; blocks under different salts are never shared." : "")));
      if (again !== undefined) el.querySelector(`[data-block="${again}"]`)?.focus();
    };
    draw();
    model.on("change:frame", draw);
  },
};
