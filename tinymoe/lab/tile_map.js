// Sorted rows in tiles, a line for each tile: its rows, the room left in it, and which blocks of features are done. Draws
// model.get("frame"), made by tinymoe.lab.widgets.lessons.tiles; runs under anywidget in JupyterLab and, with a stand-in for the
// model, in a static page.
const make = (space) => (tag, attrs = {}, ...kids) => {
  const e = document.createElementNS(space, tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const h = make("http://www.w3.org/1999/xhtml"), svg = make("http://www.w3.org/2000/svg");
const LEFT = 80, ROOM = 448, BLOCK = 16, HIGH = 22, TOP = 20, RIGHT = 48;

const STYLE = `
.tm-tiles { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 40%, var(--bg)); --now: #0072b2;
  color: var(--fg); font: 13px/1.35 system-ui, sans-serif; padding: 4px; overflow-x: auto; }
.tm-tiles svg { display: block; max-width: none; } .tm-tiles text { fill: var(--fg); font: 10px ui-monospace, monospace; white-space: pre; }
.tm-tiles text.name { font: 12px system-ui, sans-serif; } .tm-tiles text.dim { fill: var(--dim); font: 12px system-ui, sans-serif; }
.tm-tiles .now text { font-weight: 700; }
.tm-tiles .row { fill: none; stroke: var(--line); } .tm-tiles .now .row { stroke: var(--now); stroke-width: 2; }
.tm-tiles .room { fill: url(#tm-room); stroke: var(--line); stroke-opacity: .6; }
.tm-tiles .block { fill: none; stroke: var(--line); } .tm-tiles .block.done { fill: var(--line); } .tm-tiles .block.at { fill: var(--now); stroke: var(--now); }
.tm-tiles .key { color: var(--dim); font-size: 12px; margin: 6px 0 0; }
.tm-tiles .key i { display: inline-block; width: 12px; height: 12px; vertical-align: -2px; margin: 0 4px 0 10px; box-sizing: border-box; border: 1px solid var(--line); }
.tm-tiles i.room { background: repeating-linear-gradient(135deg, var(--line) 0 1px, var(--bg) 1px 4px); }
.tm-tiles i.done { background: var(--line); } .tm-tiles .key i.at { background: var(--now); border-color: var(--now); }`;

const short = (word, wide) => [...JSON.stringify(word).slice(1, -1)].slice(0, Math.floor((wide - 3) / 6)).join("");

function line(frame, n, y) {
  const [expert, first, size] = frame.tiles[n], [tile, block] = frame.now, wide = ROOM / frame.block_m, now = n === tile;
  const group = svg("g", { class: now ? "now" : null, "data-tile": n });
  group.append(svg("text", { class: "name", x: 2, y: y + 15 }, `${now ? "▸" : " "} expert ${expert}`));
  for (let r = 0; r < frame.block_m; r++) {
    const x = LEFT + r * wide;
    group.append(svg("rect", { class: r < size ? "row" : "room", x: x + 1, y: y + 2, width: wide - 2, height: HIGH - 5 }));
    if (r < size && wide >= 24) group.append(svg("text", { x: x + 3, y: y + 14 }, short(frame.words[first + r] ?? "", wide)));
  }
  for (let b = 0; b < frame.blocks; b++) {
    const kind = now && b === block ? "block at" : frame.done[n].includes(b) ? "block done" : "block";
    group.append(svg("rect", { class: kind, x: LEFT + ROOM + 14 + b * BLOCK, y: y + 4, width: BLOCK - 3, height: HIGH - 9 }));
  }
  const shown = frame.tiles.findIndex((t) => t[0] === expert) === n; // an expert's share stands at its first tile
  const percent = frame.experts.find((e) => e[0] === expert)[1];
  if (shown) group.append(svg("text", { class: "name", x: LEFT + ROOM + 24 + frame.blocks * BLOCK, y: y + 15 }, `${percent} %`));
  return group;
}

export default {
  render({ model, el }) {
    const draw = () => {
      const frame = model.get("frame"), [tile] = frame.now, blocks = LEFT + ROOM + 14, end = blocks + frame.blocks * BLOCK + 10;
      const said = tile < 0 ? "no tile is left for this program" : `program ${frame.step} works on tile ${tile}, expert ${frame.tiles[tile][0]}`;
      const tree = svg("svg", { width: end + RIGHT, height: TOP + frame.tiles.length * HIGH + 2, role: "img", "aria-label": `tile map: ${said}` });
      tree.append(svg("defs", {}, svg("pattern", { id: "tm-room", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
        svg("line", { y2: 5, style: "stroke:var(--line);stroke-width:2" }))));
      tree.append(svg("text", { class: "dim", x: LEFT, y: 12 }, `rows of a tile (room for ${frame.block_m})`),
        svg("text", { class: "dim", x: blocks, y: 12 }, "features"), svg("text", { class: "dim", x: end, y: 12 }, "read"));
      frame.tiles.forEach((_, n) => tree.append(line(frame, n, TOP + n * HIGH)));
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-tiles" }, tree,
        h("p", { class: "key" }, "Line: a tile; word: a token that visits the expert; read: share of the expert’s weights.", h("i", { class: "room" }), "room left: multiplied, never stored",
          h("i", { class: "at" }), "this program's block of features", h("i", { class: "done" }), "done")));
    };
    draw();
    model.on("change:frame", draw);
  },
};
