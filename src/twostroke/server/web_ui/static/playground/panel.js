// The settings of a column, as a form.

import { h } from "../shared/dom.js";
import { FormEditor } from "./form.js";
import { defaultSettings, FIELDS } from "./settings.js";
import { toolsEditor } from "./toolbox.js";

const GROUPS = [
  { fields: ["system"], isOfChats: true },
  { title: "Sampling", fields: ["temperature", "max_tokens", "top_p", "top_k", "min_p", "seed"] },
  { fields: ["logprobs"] },
  { title: "Response format", fields: ["form"] },
  { title: "Tools", isFolded: true, isOfChats: true, fields: ["tools", "tool_choice", "parallel_tool_calls"] },
  { title: "More", isFolded: true, fields: ["presence_penalty", "frequency_penalty", "repetition_penalty", "n", "speculate", "service_tier", "stop", "extra"] },
];

/** Draws one column's settings; `onChange` is called after each change. */
export class Panel {
  #onChange;

  constructor(onChange) {
    this.#onChange = onChange;
    this.element = h("form.panel", { "aria-label": "Settings", novalidate: true });
    this.element.addEventListener("submit", (event) => event.preventDefault());
  }

  /** `kind` is that of the conversation: chats have settings that texts have not. */
  show(settings, model, kind) {
    const start = defaultSettings(kind);
    const groups = GROUPS.filter(({ isOfChats }) => !isOfChats || kind === "chat").map(({ title, isFolded, fields }) => {
      const rows = fields.map((name) => this.#row(FIELDS.find((field) => field.name === name), settings, model));
      if (isFolded) {
        const isUsed = fields.some((name) => settings[name] !== start[name]);
        return h("details.group", { open: isUsed }, h("summary", {}, title), h("div.grid", {}, rows));
      }
      return h("fieldset.group", {}, title ? h("legend", {}, title) : h("legend.unseen", {}, rows[0].textContent), h("div.grid", {}, rows));
    });
    this.element.replaceChildren(...groups);
  }

  #row(field, settings, model) {
    if (field.kind === "tools") return h("div.cell.wide-cell", {}, toolsEditor(settings, model, this.#onChange));
    const id = `setting-${field.name}`;
    const put = (value) => {
      settings[field.name] = value;
      this.#onChange();
    };
    const input = ENTRIES[field.kind](field, id, settings[field.name], put);
    const label = h("label", { for: id }, field.label);
    if (field.name === "form") {
      const editor = new FormEditor(settings, model, () => this.#onChange());
      input.addEventListener("change", () => editor.show());
      label.className = "unseen";
      return h("div.cell.wide-cell", {}, label, input, editor.element);
    }
    if (field.kind === "switch") return h("div.cell.wide-cell.switch", {}, input, label);
    return h(`div.cell${field.isWide || field.kind === "text" ? ".wide-cell" : ""}`, {}, label, input);
  }
}

const ENTRIES = {
  number: numberEntry,
  integer: numberEntry,
  text({ rows, hint, isCode }, id, value, put) {
    const area = h(`textarea${isCode ? ".mono" : ""}`, { id, rows, placeholder: hint, spellcheck: isCode ? "false" : null });
    area.value = value;
    area.addEventListener("input", () => put(area.value));
    return area;
  },
  choice({ options }, id, value, put) {
    const select = h("select", { id }, options.map(([word, text]) => h("option", { value: word }, text)));
    select.value = value;
    select.addEventListener("change", () => put(select.value));
    return select;
  },
  switch(_field, id, value, put) {
    const box = h("input", { id, type: "checkbox", checked: value });
    box.addEventListener("change", () => put(box.checked));
    return box;
  },
};

function numberEntry({ min, max, step, hint }, id, value, put) {
  const input = h("input", { id, type: "number", inputmode: "decimal", min, max, step: "any", placeholder: hint, "data-step": step });
  input.value = value;
  input.addEventListener("input", () => {
    input.setAttribute("aria-invalid", String(!input.validity.valid));
    put(input.validity.badInput ? "?" : input.value);
  });
  return input;
}
