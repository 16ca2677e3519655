// A token's router logits, a row for each expert: where the logit stands, its share of the softmax, and, for the chosen, the
// weight. Draws model.get("frame"), made by tinymoe.lab.widgets.lessons.dial; runs under anywidget in JupyterLab and, with a
// stand-in for the model, in a static page. The frame holds the choice for several k, so that k needs no kernel.
const make = (space) => (tag, attrs = {}, ...kids) => {
  const e = document.createElementNS(space, tag);
  for (const k in attrs) if (attrs[k] != null) e.setAttribute(k, attrs[k]);
  e.append(...kids.filter((k) => k != null));
  return e;
};
const h = make("http://www.w3.org/1999/xhtml"), svg = make("http://www.w3.org/2000/svg");
const WIDE = 190, HIGH = 18;
const decimal = (n) => `${n < 0 ? "−" : ""}${(Math.abs(n) / 100).toFixed(2)}`;

const STYLE = `
.tm-dial { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  --dim: color-mix(in srgb, var(--fg) 72%, var(--bg)); --line: color-mix(in srgb, var(--fg) 40%, var(--bg));
  color: var(--fg); font: 13px/1.3 system-ui, sans-serif; padding: 4px; overflow-x: auto; }
.tm-dial table { border-collapse: collapse; margin: 0; width: auto; display: table; } .tm-dial tr { background: none !important; }
.tm-dial td, .tm-dial th { padding: 1px 10px 1px 0; text-align: left; border: 0; font-weight: 400; background: none; white-space: nowrap; font-variant-numeric: tabular-nums; }
.tm-dial thead th, .tm-dial .key { color: var(--dim); font-size: 12px; } .tm-dial td.n { text-align: right; } .tm-dial .key { margin: 5px 0 0; }
.tm-dial tr.in th, .tm-dial tr.in td { font-weight: 700; } .tm-dial tr:not(.in) td.n { color: var(--dim); }
.tm-dial svg { display: block; } .tm-dial .axis { stroke: var(--line); } .tm-dial .last { stroke: #d55e00; stroke-width: 2; stroke-dasharray: 4 3; }
.tm-dial .dot { fill: var(--line); } .tm-dial .in .dot { fill: #0072b2; } .tm-dial .turned .dot { stroke: #e69f00; stroke-width: 3; } .tm-dial .own { fill: none; stroke: var(--dim); }
.tm-dial .track { stroke: #e69f00; stroke-width: 2; }
.tm-dial .bar { display: inline-block; height: 10px; margin-right: 5px; box-sizing: border-box; border: 1px solid var(--line); vertical-align: -1px; }
.tm-dial .weight .bar { background: #0072b2; border-color: #0072b2; }
.tm-dial button { font: inherit; font-weight: inherit; color: inherit; background: none; border: 1px solid transparent; border-radius: 4px; padding: 0 4px; margin-left: -5px; cursor: pointer; }
.tm-dial button:hover { border-color: var(--line); } .tm-dial :focus-visible { outline: 3px solid #56b4e9; }
.tm-dial fieldset { border: 0; padding: 0; margin: 0 0 5px; display: flex; gap: 12px; } .tm-dial legend { float: left; padding: 0; margin: 0 10px 0 0; font: inherit; width: auto; }
.tm-dial input { accent-color: #0072b2; margin: 0 4px 0 0; vertical-align: -1px; } .tm-dial p[role=status] { margin: 5px 0 0; min-height: 1.3em; }`;

function line(frame, expert, lowest) {
  const [low, high] = frame.range, x = (v) => 6 + ((WIDE - 12) * (v - low)) / (high - low), mid = HIGH / 2;
  const turned = expert === frame.expert, at = x(frame.logits[expert]), tree = svg("svg", { width: WIDE, height: HIGH, "aria-hidden": "true" });
  tree.append(svg("line", { class: "axis", x1: 6, x2: WIDE - 6, y1: mid, y2: mid }));
  if (turned) tree.append(svg("line", { class: "track", x1: x(frame.own), x2: at, y1: mid, y2: mid }), svg("circle", { class: "own", cx: x(frame.own), cy: mid, r: 5 }));
  tree.append(svg("line", { class: "last", x1: x(lowest), x2: x(lowest), y1: 0, y2: HIGH }), svg("circle", { class: "dot", cx: at, cy: mid, r: turned ? 6 : 5 }));
  return tree;
}
const bar = (percent, what) => h("td", { class: what }, h("span", { class: "bar", style: `width:${0.7 * percent}px` }), `${percent} %`);

export default {
  render({ model, el }) {
    const name = `tm-dial-${Math.random().toString(36).slice(2)}`;
    let k = model.get("frame").k;
    const draw = () => {
      const frame = model.get("frame"), [ids, weights] = frame.best[k - 1], lowest = Math.min(...ids.map((x) => frame.logits[x]));
      const focus = el.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
      const turn = (x) => { model.set("selection", `expert ${x}`); model.save_changes(); };
      const title = (x) => {
        const words = [`expert ${x}`, ...(x === frame.expert ? [" ◂ dial"] : [])];
        if (!model.get("turnable")) return words;
        const button = h("button", { type: "button", title: `turn expert ${x}`, "data-key": `expert ${x}` }, ...words);
        button.addEventListener("click", () => turn(x));
        return [button];
      };
      const rows = frame.logits.map((logit, x) => {
        const rank = ids.indexOf(x), kind = [rank >= 0 && "in", x === frame.expert && "turned"].filter(Boolean).join(" ");
        return h("tr", { class: kind || null, "data-expert": x }, h("th", { scope: "row" }, ...title(x)), h("td", {}, line(frame, x, lowest)), h("td", { class: "n" }, decimal(logit)),
          bar(frame.share[x], "share"), ...(rank < 0 ? [h("td", {}, ""), h("td", {}, "")] : [bar(weights[rank], "weight"), h("td", {}, `no. ${rank + 1}`)]));
      });
      const radios = frame.best.map((_, n) => {
        const input = h("input", { type: "radio", name, value: n + 1, "data-key": `k ${n + 1}` });
        input.checked = n + 1 === k;
        input.addEventListener("change", () => { k = n + 1; draw(); });
        return h("label", {}, input, `${n + 1}`);
      });
      const kept = ids.reduce((sum, x) => sum + frame.share[x], 0), each = ids.map((x, n) => `expert ${x} with ${weights[n]} %`);
      el.replaceChildren(h("style", {}, STYLE), h("div", { class: "tm-dial", "data-lm-suppress-shortcuts": "true" },
        h("fieldset", {}, h("legend", {}, "experts chosen (k):"), ...radios),
        h("table", {}, h("thead", {}, h("tr", {}, ...["", "logit", "", "share of the softmax", "weight", "chosen"].map((t) => h("th", { scope: "col" }, t)))), h("tbody", {}, ...rows)),
        h("p", { role: "status", "aria-live": "polite" }, k === frame.k ? "" : `With k = ${k} instead: ${each.join(", ")}; about ${Math.min(kept, 100)} % of the softmax.`),
        h("p", { class: "key" }, "Dot: the logit. Orange ring: the dial; hollow ring: where the router put it. Dashed: the logit of the last one chosen. Bold: chosen.")));
      if (focus !== undefined) el.querySelector(`[data-key="${focus}"]`)?.focus();
    };
    draw();
    model.on("change:frame", draw);
  },
};
