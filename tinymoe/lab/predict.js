// A question about what comes next. Draws model.get("frame"), made by tinymoe.lab.widgets.predict: {question, choices,
// answer, because}. The first choice counts; then the answer and its reason are shown. Runs in JupyterLab and in a static page.
const make = (tag, attrs = {}, ...kids) => {
  const e = document.createElement(tag);
  for (const k in attrs) e.setAttribute(k, attrs[k]);
  e.append(...kids);
  return e;
};

const STYLE = `
.tm-quiz { --fg: var(--jp-content-font-color1, var(--pst-color-text-base, var(--vscode-editor-foreground, light-dark(#1b1b1b, #e8e8e8))));
  --bg: var(--jp-layout-color0, var(--pst-color-background, var(--vscode-editor-background, light-dark(#fff, #121212))));
  color: var(--fg); font: 14px/1.4 system-ui, sans-serif; padding: 4px; max-width: 720px; }
.tm-quiz fieldset { border: 1.5px solid color-mix(in srgb, var(--fg) 45%, var(--bg)); border-radius: 7px; padding: 8px 14px 10px; margin: 0; }
.tm-quiz legend { font: inherit; font-weight: 600; padding: 0 6px; width: auto; float: none; margin: 0; }
.tm-quiz label { display: inline-block; margin: 3px 8px 3px 0; padding: 3px 10px; border: 1px solid color-mix(in srgb, var(--fg) 35%, var(--bg)); border-radius: 5px; cursor: pointer; }
.tm-quiz label:focus-within { outline: 3px solid #56b4e9; } .tm-quiz input { accent-color: #0072b2; margin: 0 6px 0 0; }
.tm-quiz .right { border: 2px solid #009e73; font-weight: 600; } .tm-quiz .wrong { border: 2px dashed #d55e00; }
.tm-quiz p { margin: 6px 0 0; min-height: 1.4em; }`;

export default {
  render({ model, el }) {
    const draw = () => {
      const { question, choices, answer, because } = model.get("frame");
      const group = `tm-quiz-${Math.random().toString(36).slice(2)}`;
      const verdict = make("p", { role: "status", "aria-live": "polite" });
      const labels = choices.map((text, i) => make("label", {}, make("input", { type: "radio", name: group, value: i }), text));
      const inputs = labels.map((l) => l.querySelector("input"));
      const reveal = (choice) => {
        inputs.forEach((input, i) => { input.disabled = true; input.checked = i === choice; });
        labels[answer].classList.add("right");
        labels[answer].append(" ✓");
        if (choice !== answer) { labels[choice].classList.add("wrong"); labels[choice].append(" ✗"); }
        verdict.textContent = (choice === answer ? "Right: " : `No, it was ${choices[answer]}: `) + because;
      };
      inputs.forEach((input, i) => input.addEventListener("change", () => { model.set("choice", i); model.save_changes(); reveal(i); }));
      el.replaceChildren(make("style", {}, STYLE), make("div", { class: "tm-quiz", "data-lm-suppress-shortcuts": "true" },
        make("fieldset", {}, make("legend", {}, `Predict: ${question}`), ...labels, verdict)));
      const before = model.get("choice");
      if (before >= 0) reveal(before);
    };
    draw();
    model.on("change:frame", draw);
  },
};
