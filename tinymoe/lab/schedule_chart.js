// W6: rows are sequences, columns are steps; each cell says what ran. Draws model.get("frame"), made by
// tinymoe.lab.frames.steps.schedule; runs under anywidget in JupyterLab and, with a stand-in for the model, in a static page.
const h = (tag, attrs = {}, ...kids) => {
  const e = document.createElement(tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const letters = (n) => (n < 26 ? "" : letters(Math.floor(n / 26) - 1)) + String.fromCharCode(65 + (n % 26));
const WORDS = { P: "prefill", D: "decode", W: "waits", X: "preempted" };
const ENDS = ["stop", "length", "abort", "error"];

const STYLE = `
.tm-sched { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 45%, var(--bg));
  color: var(--fg); font: 13px/1.3 system-ui, sans-serif; padding: 4px; }
.tm-sched .scroll { overflow-x: auto; max-width: 100%; }
.tm-sched table { border-collapse: separate; border-spacing: 3px; margin: 0; table-layout: fixed; width: max-content; }
.tm-sched th, .tm-sched td { border: 0; padding: 0; background: none; text-align: center; font-weight: 400; white-space: nowrap; }
.tm-sched thead th { color: var(--dim); font-size: 12px; }
.tm-sched th[scope=row] { position: sticky; left: 0; z-index: 1; background: var(--bg); text-align: left; padding-right: 8px; }
.tm-sched th[scope=row] b { font-size: 14px; } .tm-sched th[scope=row] small { color: var(--dim); margin-left: 4px; }
.tm-sched td { width: 42px; min-width: 42px; height: 30px; border-radius: 5px; position: relative; }
.tm-sched td.P, .tm-sched td.D, .tm-sched td.X { border: 2px solid var(--c); background: color-mix(in srgb, var(--c) 24%, var(--bg)); cursor: pointer; }
.tm-sched .P { --c: #0072b2; } .tm-sched .D { --c: #009e73; } .tm-sched .X { --c: #d55e00; }
.tm-sched td.D { border-style: double; border-width: 4px; }
.tm-sched td.X { background: repeating-linear-gradient(135deg, color-mix(in srgb, var(--c) 45%, var(--bg)) 0 4px, var(--bg) 4px 9px); }
.tm-sched td.W { border: 1.5px dotted var(--line); color: var(--dim); cursor: pointer; }
.tm-sched td b { font-weight: 600; } .tm-sched td small { font-size: 10.5px; display: block; line-height: 1; }
.tm-sched td.end::after { content: "■"; position: absolute; right: 2px; bottom: 0; font-size: 9px; line-height: 1.1; }
.tm-sched td:focus-visible { outline: 3px solid var(--fg); outline-offset: 1px; }
.tm-sched .last { color: var(--fg); font-weight: 700; text-decoration: underline; text-underline-offset: 3px; }
.tm-sched tfoot td { height: 46px; vertical-align: bottom; font-size: 11px; color: var(--fg); }
.tm-sched .bar { width: 30px; height: 28px; margin: 0 auto; border: 1px solid var(--line); border-radius: 3px;
  background: linear-gradient(to top, color-mix(in srgb, var(--fg) 60%, var(--bg)) var(--used), transparent var(--used)); transition: background .15s; }
.tm-sched .key { color: var(--dim); font-size: 12px; margin: 6px 0 0; } .tm-sched .key b { color: var(--fg); }
@media (prefers-reduced-motion: reduce) { .tm-sched * { transition: none !important; } }`;

function cell(step, row, found, ended) {
  const [seq, code, tokens, cached] = found;
  const end = ended.find((e) => e[0] === seq && e[1] === step);
  const many = `${tokens} token${tokens === 1 ? "" : "s"}`;
  const parts = [`step ${step}, ${letters(seq)}: ${WORDS[code]}${code === "X" ? `, loses ${many}` : code === "W" ? "" : ` ${many}`}`];
  if (cached) parts.push(`${cached} found in the prefix index`);
  if (end) parts.push(`finishes: ${ENDS[end[2]]}`);
  const text = parts.join(", ");
  return h("td", { class: `${code}${end ? " end" : ""}`, tabindex: -1, title: text, "aria-label": text, "data-seq": seq, "data-at": `${row},${step}` },
    h("b", {}, code), code === "P" || code === "X" || tokens > 1 ? ` ${tokens}` : "", cached ? h("small", {}, `+${cached}`) : null);
}

export default {
  render({ model, el }) {
    const draw = () => {
      const frame = model.get("frame");
      const again = el.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
      const steps = frame.columns.map((c) => c[0]), last = steps.at(-1);
      const found = new Map(frame.columns.flatMap((c) => c[3].map((x) => [`${x[0]},${c[0]}`, x])));
      const rows = frame.rows.map(([seq, , prompt], row) => h("tr", {},
        h("th", { scope: "row" }, h("b", {}, letters(seq)), h("small", {}, prompt ? `${prompt} tok` : "")),
        ...steps.map((s) => { const f = found.get(`${seq},${s}`); return f ? cell(s, row, f, frame.ended) : h("td", {}); })));
      const head = h("tr", {}, h("th", { scope: "col" }, "step"), ...steps.map((s) => h("th", { scope: "col", class: s === last ? "last" : null }, String(s))));
      const foot = h("tr", {}, h("th", { scope: "row" }, "budget", h("small", {}, "tokens")), ...frame.columns.map(([s, budget, used]) =>
        h("td", { "aria-label": `step ${s}: ${used} of ${budget} tokens` },
          h("div", { class: "bar", style: `--used:${Math.round((100 * used) / Math.max(1, budget))}%` }), `${used}/${budget}`)));
      const table = h("table", { "aria-label": `schedule up to step ${frame.step}` }, h("thead", {}, head), h("tbody", {}, ...rows), h("tfoot", {}, foot));
      const cells = [...table.querySelectorAll("tbody td[data-seq]")];
      const select = (e) => { if (e?.dataset?.seq) { model.set("selection", `seq ${e.dataset.seq}`); model.save_changes(); } };
      if (cells.length) cells.at(-1).tabIndex = 0;
      table.addEventListener("click", (event) => select(event.target.closest("td")));
      table.addEventListener("keydown", (event) => {
        const at = document.activeElement, [r, s] = (at?.dataset?.at ?? ",").split(",").map(Number);
        const move = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
        if (event.key === "Enter" || event.key === " ") select(at);
        else if (!move) return;
        else {
          // Cells may be missing: take the nearest one in that direction.
          const ahead = cells.filter((c) => { const [y, x] = c.dataset.at.split(",").map(Number); return (y - r) * move[0] + (x - s) * move[1] > 0 && (move[0] ? x === s : y === r); });
          const to = move[0] + move[1] > 0 ? ahead[0] : ahead.at(-1);
          if (to) { at.tabIndex = -1; to.tabIndex = 0; to.focus(); }
        }
        event.preventDefault();
        event.stopPropagation();
      });
      const scroll = h("div", { class: "scroll" }, table);
      const more = frame.dropped ? `${frame.dropped} earlier steps are not drawn. ` : "";
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-sched", "data-lm-suppress-shortcuts": "true" }, scroll,
        h("p", { class: "key" }, more, h("b", {}, "P"), " prefill and its tokens, ", h("b", {}, "D"), " decode, ", h("b", {}, "W"), " waits, ", h("b", {}, "X"),
          " preempted and the tokens lost, ", h("b", {}, "+n"), " tokens found in the prefix index, ", h("b", {}, "■"), " finished.")));
      scroll.scrollLeft = scroll.scrollWidth;
      if (again) el.querySelector(`[data-at="${again}"]`)?.focus();
    };
    draw();
    model.on("change:frame", draw);
  },
};
