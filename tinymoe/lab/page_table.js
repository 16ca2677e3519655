// W3: the blocks of the cache with their owners, and each sequence's block table. Draws model.get("frame"), made by
// tinymoe.lab.frames.pages; runs under anywidget in JupyterLab and, with a stand-in for the model, in a static page.
const h = (tag, attrs = {}, ...kids) => {
  const e = document.createElement(tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const HUES = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#f0e442"]; // Okabe-Ito
const letters = (n) => (n < 26 ? "" : letters(Math.floor(n / 26) - 1)) + String.fromCharCode(65 + (n % 26));
const hue = (seq) => HUES[seq % HUES.length];

const STYLE = `
.tm-pages { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 45%, var(--bg));
  color: var(--fg); font: 13px/1.35 system-ui, sans-serif; display: flex; flex-wrap: wrap; gap: 14px 28px; padding: 4px; }
.tm-pages h4 { font: 600 12px/1.4 system-ui, sans-serif; color: var(--dim); margin: 0 0 5px; }
.tm-pages [role=row] { display: flex; gap: 4px; margin-bottom: 4px; }
.tm-pages [role=gridcell] { width: 46px; height: 40px; box-sizing: border-box; border: 2px solid var(--c, var(--line)); border-radius: 5px;
  background: color-mix(in srgb, var(--c, transparent) 22%, var(--bg)); text-align: center; line-height: 1.2; cursor: pointer; position: relative;
  transition: background .15s, border-color .15s; padding-top: 2px; overflow: hidden; }
.tm-pages [role=gridcell] b { display: block; font-size: 13px; white-space: nowrap; }
.tm-pages [role=gridcell] small { font-size: 10.5px; color: var(--dim); }
.tm-pages .shared { border-style: double; border-width: 5px; padding-top: 0; }
.tm-pages .shared b { line-height: 1; }
.tm-pages .cached { background: repeating-linear-gradient(135deg, transparent 0 5px, color-mix(in srgb, var(--fg) 16%, transparent) 5px 7px); }
.tm-pages .cached b { font-weight: 400; color: var(--dim); }
.tm-pages .free { border: 1.5px dashed var(--line); }
.tm-pages .now { outline: 3px solid var(--fg); outline-offset: 1px; }
.tm-pages [role=gridcell].now::after { content: "●"; position: absolute; right: 2px; top: -2px; font-size: 9px; }
.tm-pages [role=gridcell]:focus-visible { box-shadow: 0 0 0 3px var(--bg), 0 0 0 6px #56b4e9; }
.tm-pages table { border-collapse: collapse; } .tm-pages td, .tm-pages th { padding: 2px 6px 2px 0; text-align: left; font-weight: 400; border: 0; background: none; }
.tm-pages .seq { display: inline-block; min-width: 20px; padding: 1px 5px; border-radius: 4px; border: 2px solid var(--c); text-align: center; font-weight: 600;
  background: color-mix(in srgb, var(--c) 22%, var(--bg)); }
.tm-pages .chip { display: inline-block; min-width: 26px; padding: 1px 3px 2px; margin: 1px 3px 1px 0; border: 1px solid var(--line); border-radius: 3px; text-align: center;
  background: linear-gradient(var(--c, transparent), var(--c, transparent)) left bottom / var(--full, 100%) 3px no-repeat; }
.tm-pages .chip.two { border-style: double; border-width: 3px; }
.tm-pages .dim { color: var(--dim); } .tm-pages .side { max-width: 340px; }
.tm-pages .key { flex-basis: 100%; color: var(--dim); font-size: 12px; margin: 0; }
@media (prefers-reduced-motion: reduce) { .tm-pages * { transition: none !important; } }`;

function cell(frame, block, cached, select) {
  const owners = frame.owners[block], names = owners.map(letters);
  const state = owners.length > 1 ? "shared" : owners.length ? "owned" : cached.has(block) ? "cached" : "free";
  const now = frame.touched.includes(block);
  const text = names.length > 2 ? `${names[0]}+${names.length - 1}` : names.join("+");
  const what = owners.length ? `owned by ${names.join(" and ")}` : state === "cached" ? "cached, no owner" : "free";
  const full = `block ${block}, ${what}${now ? ", changed now" : ""}`;
  const style = owners.length ? `--c:${hue(owners[0])}` : null;
  const e = h("div", { role: "gridcell", class: `${state}${now ? " now" : ""}`, style, tabindex: -1, title: full, "aria-label": full, "data-block": block },
    h("small", {}, String(block)), h("b", {}, text || (state === "cached" ? "kept" : "·")));
  e.addEventListener("click", () => select(block));
  return e;
}

// One cell is in the tab order; the arrow keys move between cells, Enter or Space asks about one.
function keyboard(grid, columns, select) {
  const cells = [...grid.querySelectorAll("[role=gridcell]")];
  if (cells.length) cells[0].tabIndex = 0;
  grid.addEventListener("keydown", (event) => {
    const at = cells.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: cells.length - 1 }[event.key];
    if (event.key === "Enter" || event.key === " ") select(Number(cells[at]?.dataset.block));
    else if (to === undefined) return;
    else if (cells[to]) { cells[at].tabIndex = -1; cells[to].tabIndex = 0; cells[to].focus(); }
    event.preventDefault();
    event.stopPropagation();
  });
}

function tables(frame) {
  const size = frame.block_size;
  const rows = frame.tables.map(([seq, computed, blocks]) => {
    const chips = blocks.map((b, i) => {
      const part = size ? Math.max(0, Math.min(100, Math.round((100 * (computed - i * size)) / size))) : 100;
      const two = b >= 0 && frame.owners[b].length > 1;
      return h("span", { class: `chip${two ? " two" : ""}${frame.touched.includes(b) ? " now" : ""}`, style: `--c:${hue(seq)};--full:${part}%` }, b < 0 ? "?" : String(b));
    });
    return h("tr", {}, h("th", { scope: "row" }, h("span", { class: "seq", style: `--c:${hue(seq)}` }, letters(seq))),
      h("td", { class: "dim" }, `${computed} tok`), h("td", {}, ...chips));
  });
  return rows.length ? h("table", {}, ...rows) : h("p", { class: "dim" }, "no sequence holds a block");
}

const list = (title, blocks) => [h("h4", { style: "margin-top:10px" }, title),
  h("div", { class: "dim" }, ...(blocks.length ? blocks.slice(0, 24).map((b) => h("span", { class: "chip", style: "--full:0%" }, String(b))) : ["none"]),
    ...(blocks.length > 24 ? [` and ${blocks.length - 24} more`] : []))];

export default {
  render({ model, el }) {
    const draw = () => {
      const frame = model.get("frame");
      const again = el.contains(document.activeElement) ? document.activeElement.dataset.block : undefined;
      const columns = frame.owners.length > 64 ? 16 : 8;
      const cached = new Set(frame.cached);
      const select = (block) => { model.set("selection", `block ${block}`); model.save_changes(); };
      const grid = h("div", { role: "grid", "aria-label": `page table, step ${frame.step}` });
      for (let b = 0; b < frame.owners.length; b += columns)
        grid.append(h("div", { role: "row" }, ...frame.owners.slice(b, b + columns).map((_, i) => cell(frame, b + i, cached, select))));
      keyboard(grid, columns, select);
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-pages", "data-lm-suppress-shortcuts": "true" },
        h("div", {}, h("h4", {}, `${frame.owners.length} blocks`), grid),
        h("div", { class: "side" }, h("h4", {}, "block tables, page 0 first"), tables(frame), ...list("free, next one first", frame.free), ...list("cached, first to be evicted first", frame.cached)),
        h("p", { class: "key" }, "Letters are owners. Double border: shared. Hatched, “kept”: cached without an owner. Dashed: free. ●: changed at this moment. Bar: how full.")));
      if (again !== undefined) el.querySelector(`[data-block="${again}"]`)?.focus();
    };
    draw();
    model.on("change:frame", draw);
  },
};
