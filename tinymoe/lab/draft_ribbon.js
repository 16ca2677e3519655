// W8: what was drafted in each step, what stayed, and what came in the place of the rest. Draws model.get("frame"), made by
// tinymoe.lab.frames.steps.drafts; runs under anywidget in JupyterLab and, with a stand-in for the model, in a static page.
const h = (tag, attrs = {}, ...kids) => {
  const e = document.createElement(tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const letters = (n) => (n < 26 ? "" : letters(Math.floor(n / 26) - 1)) + String.fromCharCode(65 + (n % 26));
const KINDS = { A: ["✓", "accepted"], R: ["✗", "rejected"], U: ["–", "not looked at"], P: ["?", "not judged yet"], C: ["■", "accepted, but behind the end"],
  N: ["↻", "redrawn"], B: ["+", "bonus"], S: ["•", "without drafts"] };
const ENDS = ["stop", "length", "abort", "error"];
const percent = (millionths) => (millionths >= 1e4 || !millionths ? (Math.round(millionths / 1e3) / 10).toFixed(1) : (millionths / 1e4).toPrecision(2)) + " %";

const STYLE = `
.tm-drafts { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 45%, var(--bg));
  color: var(--fg); font: 13px/1.35 system-ui, sans-serif; padding: 4px; }
.tm-drafts .scroll { overflow-x: auto; max-width: 100%; padding: 3px; }
.tm-drafts [role=row] { display: flex; gap: 4px; align-items: center; margin-bottom: 4px; width: max-content; }
.tm-drafts [role=rowheader] { width: 92px; color: var(--dim); font-size: 12px; white-space: nowrap; position: sticky; left: 0; background: var(--bg); z-index: 1; }
.tm-drafts .last [role=rowheader] { color: var(--fg); font-weight: 700; } .tm-drafts .last [role=rowheader]::before { content: "▸"; }
.tm-drafts [role=gridcell] { box-sizing: border-box; min-width: 44px; height: 30px; padding: 3px 7px; border: 2px solid var(--c, var(--line)); border-radius: 5px; cursor: pointer;
  background: color-mix(in srgb, var(--c, transparent) 20%, var(--bg)); white-space: pre; display: flex; align-items: center; justify-content: center; transition: background .15s; }
.tm-drafts [role=gridcell] code { font: 12px ui-monospace, monospace; color: inherit; background: none; padding: 0; border: 0; }
.tm-drafts [role=gridcell] b { margin-right: 5px; }
.tm-drafts .A { --c: #009e73; } .tm-drafts .R { --c: #d55e00; } .tm-drafts .N { --c: #0072b2; border-style: double; border-width: 4px; padding: 1px 5px; }
.tm-drafts .B { --c: #e69f00; border-style: double; border-width: 4px; padding: 1px 5px; } .tm-drafts .C { --c: #cc79a7; }
.tm-drafts .R { border-style: dashed; } .tm-drafts .R code, .tm-drafts .C code { text-decoration: line-through 2px; }
.tm-drafts .U, .tm-drafts .P { border: 1.5px dotted var(--line); color: var(--dim); }
.tm-drafts .S { border: 1.5px solid var(--line); }
.tm-drafts [aria-selected=true] { outline: 2px solid var(--fg); outline-offset: 1px; }
.tm-drafts [role=gridcell]:focus-visible { outline: 3px solid #56b4e9; outline-offset: 1px; }
.tm-drafts .end { color: var(--dim); font-size: 12px; }
.tm-drafts .look { border-top: 1px solid var(--line); margin-top: 6px; padding: 6px 3px 0; max-width: 640px; min-height: 84px; }
.tm-drafts .look small { color: var(--dim); font-size: 12px; }
.tm-drafts .look p { margin: 0 0 4px; white-space: pre-wrap; }
.tm-drafts .look div { display: grid; grid-template-columns: 92px 1fr 70px; gap: 8px; align-items: center; margin: 2px 0; }
.tm-drafts .look i { display: block; height: 13px; border: 1px solid var(--line); border-radius: 3px;
  background: linear-gradient(to right, var(--c) var(--full), transparent var(--full)); }
.tm-drafts .look .q { --c: #e69f00; } .tm-drafts .look .p { --c: #0072b2; }
.tm-drafts .look .q i { background: repeating-linear-gradient(135deg, transparent 0 3px, var(--bg) 3px 5px), linear-gradient(to right, var(--c) var(--full), transparent var(--full)); }
.tm-drafts .look output { text-align: right; font-variant-numeric: tabular-nums; }
.tm-drafts .key { color: var(--dim); font-size: 12px; margin: 6px 0 0; } .tm-drafts .key b { color: var(--fg); margin-left: 8px; }
@media (prefers-reduced-motion: reduce) { .tm-drafts * { transition: none !important; } }`;

const seen = (text) => JSON.stringify(text).slice(1, -1).replaceAll('\\"', '"').replaceAll(" ", "␣");
const short = (text) => (text.length > 16 ? text.slice(0, 15) + "…" : text);

export default {
  render({ model, el }) {
    const draw = () => {
      const frame = model.get("frame");
      const again = el.contains(document.activeElement) ? document.activeElement.dataset.at : undefined;
      const name = (token) => frame.names[token] ?? String(token);
      const cells = new Map(); // where -> [element, what the panel says]
      const chip = (row, line, place, [code, token, q = -1, p = -1], tail) => {
        const [step, seq, position] = row, where = `${step},${seq},${place}${tail ? "t" : ""}`;
        const chances = q < 0 ? "" : `; draft ${percent(q)}` + (p < 0 ? "" : `, model ${percent(p)}`);
        const title = `${letters(seq)}, position ${position + place}, ${JSON.stringify(name(token))}: ${KINDS[code][1]}`;
        const e = h("div", { role: "gridcell", class: code, tabindex: -1, "aria-label": `step ${step}, ${title}${chances}`, "data-at": where, "data-line": line,
          "data-token": `token ${step} ${seq} ${position + place}` }, h("b", { "aria-hidden": "true" }, KINDS[code][0]), h("code", {}, short(seen(name(token)))));
        cells.set(where, [e, title, q, p, code]);
        return e;
      };
      const grid = h("div", { role: "grid", "aria-label": `drafts up to step ${frame.step}` });
      frame.rows.forEach((row, line) => {
        const [step, seq, , drafts, tail, end] = row, [code, , place] = tail;
        const chips = drafts.map((cell, i) => chip(row, line, i, cell, false));
        // What was redrawn stands right behind what it replaces; a bonus, behind all.
        if (tail.length) chips.splice(code === "N" ? place + 1 : chips.length, 0, chip(row, line, place, tail.slice(0, 2), true));
        if (end >= 0) chips.push(h("span", { class: "end" }, `ends: ${ENDS[end]}`));
        grid.append(h("div", { role: "row", class: step === frame.step ? "last" : null }, h("div", { role: "rowheader" }, ` step ${step}, ${letters(seq)}`), ...chips));
      });
      const look = h("div", { class: "look" });
      const show = (where) => {
        const [e, title, q, p, code] = cells.get(where) ?? [];
        for (const [other] of cells.values()) other.setAttribute("aria-selected", other === e);
        const end = [1e6, 1e5, 1e4, 1e3, 100].findLast((x) => x >= Math.max(p, q)); // small chances would be no bars at all
        const bar = (kind, label, value) => h("div", { class: kind }, label, h("i", { style: `--full:${(100 * value) / end}%` }), h("output", {}, percent(value)));
        look.replaceChildren(...(!e ? [] : [h("p", {}, title, q < 0 ? "" : h("small", {}, ` (bars: 0 to ${end / 1e4} %)`)), ...(q < 0 ? [] : [bar("q", "draft: q", q)]), ...(p < 0 ? [] : [bar("p", "model: p", p)]),
          h("p", {}, q < 0 ? "The trace keeps no chances of tokens that were not drafted." : p < 0 ? "The model's opinion was not asked." : `under rejection sampling it stays with chance min(1, p/q) = ${q > p ? percent((1e6 * p) / q) : "100 %"}`)]));
      };
      const all = [...grid.querySelectorAll("[role=gridcell]")];
      const move = (to) => { if (!to) return; for (const e of all) e.tabIndex = -1; to.tabIndex = 0; to.focus(); };
      const ask = (e) => { if (e) { model.set("selection", e.dataset.token); model.save_changes(); } };
      grid.addEventListener("mouseover", (event) => { const e = event.target.closest("[role=gridcell]"); if (e) show(e.dataset.at); });
      grid.addEventListener("focusin", (event) => show(event.target.dataset.at));
      grid.addEventListener("click", (event) => ask(event.target.closest("[role=gridcell]")));
      grid.addEventListener("keydown", (event) => {
        const at = all.indexOf(document.activeElement), line = Number(all[at]?.dataset.line), mine = all.filter((e) => Number(e.dataset.line) === line);
        const beside = (other) => { const there = all.filter((e) => Number(e.dataset.line) === other); return there[Math.min(mine.indexOf(all[at]), there.length - 1)]; };
        const to = { ArrowRight: () => all[at + 1], ArrowLeft: () => all[at - 1], ArrowDown: () => beside(line + 1), ArrowUp: () => beside(line - 1), Home: () => mine[0], End: () => mine.at(-1) }[event.key];
        if (event.key === "Enter" || event.key === " ") ask(all[at]);
        else if (!to) return;
        else move(to());
        event.preventDefault();
        event.stopPropagation();
      });
      const key = Object.entries(KINDS).filter(([code]) => all.some((e) => e.classList.contains(code))).flatMap(([, [mark, words]]) => [h("b", {}, mark), ` ${words}`]);
      const more = frame.dropped ? `${frame.dropped} earlier rows are not drawn. ` : "";
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-drafts", "data-lm-suppress-shortcuts": "true" },
        h("div", { class: "scroll" }, grid), look, h("p", { class: "key" }, more, "Point at a token for its chances.", ...key)));
      // Nothing pointed at: the token that decided the last step.
      const last = all.filter((e) => e.parentElement.className === "last");
      const first = last.find((e) => e.classList.contains("R")) ?? last.findLast((e) => e.classList.contains("A")) ?? last[0] ?? all.at(-1);
      if (first) { first.tabIndex = 0; show(first.dataset.at); }
      if (again) cells.get(again)?.[0].focus();
    };
    draw();
    model.on("change:frame", draw);
  },
};
