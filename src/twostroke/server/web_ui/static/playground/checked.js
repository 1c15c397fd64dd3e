// A field for something with a syntax of its own: judged while it is typed, checked by the server on demand.

import { h } from "../shared/dom.js";
import { ask } from "../shared/server.js";

/**
 * Return nodes: label, field, buttons, verdict.
 *
 * `field` has `id`, `label`, `rows`, `text`, `example`; `put(text)` keeps what is typed; `read()`
 * throws an Error with a sentence if that cannot be meant; `toTry()` returns the path and the body of
 * a request that shows whether the server takes it; `tidy()`, if there is one, returns the text anew.
 */
export function checkedField(field, { put, read, toTry, tidy = null }) {
  const verdict = h("p.verdict", { id: `verdict-${field.id}`, role: "status" });
  const area = h("textarea.mono", { id: `setting-${field.id}`, rows: field.rows, placeholder: field.hint, spellcheck: "false", "aria-describedby": verdict.id });
  area.value = field.text;
  const say = (text, kind) => {
    verdict.textContent = text;
    verdict.dataset.kind = kind;
  };
  const typed = (text) => {
    area.value = text;
    put(text);
    try {
      read();
      say("", "");
    } catch (error) {
      say(text.trim() ? error.message : "", "wrong");
    }
  };
  const check = async () => {
    try {
      read();
      say("Checking …", "");
      const { path, body } = toTry();
      await ask(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body), isForUser: true });
      say("The server accepts this.", "right");
    } catch (error) {
      say(error.message, "wrong");
    }
    verdict.scrollIntoView({ block: "nearest" }); // it may stand below the panel's edge
  };
  const tidied = () => {
    try {
      typed(tidy());
    } catch (error) {
      say(error.message, "wrong");
      verdict.scrollIntoView({ block: "nearest" });
    }
  };
  area.addEventListener("input", () => typed(area.value));
  const button = (word, onclick) => h("button.small", { type: "button", onclick }, word);
  const buttons = [button("Check", check), button("Example", () => typed(field.example)), tidy && button("Format", tidied)].filter(Boolean);
  return [h("label", { for: area.id }, field.label), area, h("div.row", {}, buttons), verdict];
}
