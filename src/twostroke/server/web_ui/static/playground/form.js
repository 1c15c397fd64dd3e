// What an answer has to look like: an editor for the schema, pattern, texts or grammar.

import { h } from "../shared/dom.js";
import { checkedField } from "./checked.js";
import { formFields, readObject } from "./settings.js";

const KINDS = {
  json_schema: {
    label: "JSON schema",
    rows: 9,
    example: JSON.stringify(
      { type: "object", properties: { name: { type: "string" }, age: { type: "integer", minimum: 0 } }, required: ["name", "age"], additionalProperties: false },
      null,
      2,
    ),
  },
  regex: { label: "Regular expression, for the whole answer", rows: 2, example: "[0-9]{4}-[0-9]{2}-[0-9]{2}" },
  choice: { label: "Texts, one per line", rows: 4, example: "yes\nno\nnobody knows" },
  grammar: { label: "Grammar, in Lark’s notation or GBNF", rows: 7, example: 'root ::= "{" pair ("," pair)* "}"\npair ::= [a-z]+ "=" [0-9]+' },
};

export class FormEditor {
  #settings;
  #model;
  #onChange;

  constructor(settings, model, onChange) {
    this.#settings = settings;
    this.#model = model;
    this.#onChange = onChange;
    this.element = h("div.form-editor");
    this.show();
  }

  /** Show the field of the chosen kind, or nothing. */
  show() {
    const settings = this.#settings;
    const kind = KINDS[settings.form];
    if (!kind) {
      this.element.replaceChildren();
      return;
    }
    const id = `form_${settings.form}`;
    const act = {
      put: (text) => {
        settings[id] = text;
        this.#onChange();
      },
      read: () => formFields(settings),
      // One token is enough to know.
      toTry: () => ({ path: "v1/completions", body: { model: this.#model(), prompt: "x", max_tokens: 1, temperature: 0, ...formFields(settings) } }),
    };
    if (settings.form === "json_schema") {
      act.tidy = () => JSON.stringify(readObject(settings.form_json_schema, "The schema"), null, 2);
    }
    this.element.replaceChildren(...checkedField({ id, text: settings[id], ...kind }, act));
  }
}

/** Return whether an answer fits its form, as far as that can be seen here; null if it asks for none. */
export function judgeAnswer(settings, choice) {
  if (!settings.form || choice.error || choice.finish !== "stop") return null;
  if (settings.form.startsWith("json")) {
    try {
      JSON.parse(choice.text);
      return "valid JSON";
    } catch {
      return "no valid JSON";
    }
  }
  if (settings.form === "choice") {
    return settings.form_choice.split("\n").map((line) => line.trim()).includes(choice.text) ? "one of the texts" : "none of the texts";
  }
  return null;
}
