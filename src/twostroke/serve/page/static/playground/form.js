// What an answer has to look like: an editor for the schema, pattern, texts or grammar, and its check.

import { h } from "../shared/dom.js";
import { ask } from "../shared/server.js";
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
  choice: { label: "Texts, one a line", rows: 4, example: "yes\nno\nnobody knows" },
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
    const kind = KINDS[this.#settings.form];
    if (!kind) {
      this.element.replaceChildren();
      return;
    }
    const name = `form_${this.#settings.form}`;
    const area = h("textarea.mono", { id: `setting-${name}`, rows: kind.rows, spellcheck: "false", "aria-describedby": "form-verdict" });
    area.value = this.#settings[name];
    const verdict = h("p.verdict", { id: "form-verdict", role: "status" });
    const put = (text) => {
      area.value = text;
      this.#settings[name] = text;
      this.#onChange();
      this.#judge(verdict);
    };
    area.addEventListener("input", () => put(area.value));
    const button = (word, onclick) => h("button.small", { type: "button", onclick }, word);
    const buttons = [button("Check", () => this.#check(verdict)), button("Example", () => put(kind.example))];
    if (this.#settings.form === "json_schema") {
      buttons.push(button("Tidy", () => this.#tidy(put, verdict)));
    }
    this.element.replaceChildren(h("label", { for: area.id }, kind.label), area, h("div.row", {}, buttons), verdict);
  }

  #tidy(put, verdict) {
    try {
      put(JSON.stringify(readObject(this.#settings.form_json_schema, "The schema"), null, 2));
    } catch (error) {
      say(verdict, error.message, "wrong");
      verdict.scrollIntoView({ block: "nearest" });
    }
  }

  /** While it is typed: only whether it can be read. */
  #judge(verdict) {
    try {
      formFields(this.#settings);
      say(verdict, "", "");
    } catch (error) {
      say(verdict, this.#settings[`form_${this.#settings.form}`].trim() ? error.message : "", "wrong");
    }
  }

  /** On demand: whether the server takes it. One token is enough to know. */
  async #check(verdict) {
    try {
      const form = formFields(this.#settings);
      say(verdict, "Asking the server …", "");
      const body = { model: this.#model(), prompt: "x", max_tokens: 1, temperature: 0, ...form };
      await ask("v1/completions", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
      say(verdict, "The server takes this.", "right");
    } catch (error) {
      say(verdict, error.message, "wrong");
    }
    verdict.scrollIntoView({ block: "nearest" }); // it may stand below the panel's edge
  }
}

function say(verdict, text, kind) {
  verdict.textContent = text;
  verdict.dataset.kind = kind;
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
