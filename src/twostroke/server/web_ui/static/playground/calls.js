// The calls of tools in an answer: what is called with what, and a field for the result of each.

import { codeBlock } from "../markdown/draw.js";
import { h } from "../shared/dom.js";

const MAX_ROWS = 12;

/** Draws a choice's calls; `act` has `send(results)` and `keep()`, for results that are still typed. */
export class CallsView {
  #act;
  #choice = null;
  #isEditing = false; // results that were sent
  #asks = false; // whether there are fields

  constructor(act) {
    this.#act = act;
    this.element = h("div.calls");
  }

  /** Draw what the choice calls now. Results can be given once all is said, and to whole calls only. */
  update(choice, isBusy) {
    const calls = choice.calls.filter(Boolean); // while they are written, one may come before another
    if (choice !== this.#choice) this.#isEditing = false;
    const asks = !isBusy && choice.finish === "tool_calls" && (!choice.after || this.#isEditing);
    if (asks && this.#asks && choice === this.#choice) return; // drawn again, it would lose who types in it
    this.#asks = asks;
    this.#choice = choice;
    if (!calls.length) this.element.replaceChildren();
    else if (isBusy || choice.finish !== "tool_calls") this.element.replaceChildren(...calls.map((call) => drawCall(call, null)));
    else if (asks) this.#showForm(calls, choice.after !== null);
    else this.#showSent(calls);
  }

  #showSent(calls) {
    const edit = () => {
      this.#isEditing = true;
      this.update(this.#choice, false);
      this.element.querySelector("textarea").focus();
    };
    const change = h("button.small", { type: "button", title: "Continue with other results", onclick: edit }, calls.length > 1 ? "Edit the results" : "Edit the result");
    this.element.replaceChildren(...calls.map((call) => drawCall(call, sentResult(call))), h("div.row", {}, change));
  }

  /** `isAnew` tells that there are results that were sent, which stay as they are. */
  #showForm(calls, isAnew) {
    const verdict = h("p.verdict", { role: "alert", "data-kind": "wrong" });
    const areas = calls.map((call) => resultField(call, verdict));
    if (!isAnew) {
      calls.forEach((call, index) => areas[index].addEventListener("input", () => {
        call.result = areas[index].value;
        this.#act.keep();
      }));
    }
    const send = () => {
      const missing = areas.findIndex((area) => area.value.trim() === "");
      areas.forEach((area, index) => area.setAttribute("aria-invalid", String(index === missing)));
      if (missing < 0) {
        this.#isEditing = false;
        this.#act.send(areas.map((area) => area.value));
        return;
      }
      verdict.textContent = `The result of ${calls[missing].name} is missing.`;
      areas[missing].focus();
    };
    const cancel = () => {
      this.#isEditing = false;
      this.update(this.#choice, false);
    };
    const form = h("form.results", { "aria-label": "Results of the calls", novalidate: true },
      calls.map((call, index) => drawCall(call, h("div.result", {}, h("label", { for: areas[index].id }, "Result"), areas[index]))),
      h("div.row", {},
        h("button.primary", { type: "submit" }, calls.length > 1 ? "Send the results" : "Send the result"),
        isAnew ? h("button", { type: "button", onclick: cancel }, "Cancel") : h("span.hint", {}, "Press Enter to send. Calls without results are left out.")),
      verdict);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      send();
    });
    form.addEventListener("keydown", (event) => this.#key(event, areas, send, isAnew ? cancel : null));
    this.element.replaceChildren(form);
  }

  /** As elsewhere on the page, Enter sends; here only from the last field that is empty. */
  #key(event, areas, send, cancel) {
    if (event.key === "Escape" && cancel) {
      event.stopPropagation();
      cancel();
    }
    const here = areas.indexOf(event.target);
    if (here < 0 || event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    const empty = areas.find((area) => area.value.trim() === "");
    if (empty && event.target !== empty) empty.focus();
    else send();
  }
}

function resultField(call, verdict) {
  const area = h("textarea.mono", { id: `result-${call.id}-${resultField.next++}`, rows: rowsOf(call.result), placeholder: "What it returns: text or JSON", spellcheck: "false", "aria-label": `Result of ${call.name}` });
  area.value = call.result;
  area.addEventListener("input", () => {
    area.rows = rowsOf(area.value);
    area.removeAttribute("aria-invalid");
    verdict.textContent = "";
  });
  return area;
}
resultField.next = 1; // ids differ, also where two columns show one call

function rowsOf(text) {
  return Math.min(Math.max(text.split("\n").length, 3), MAX_ROWS);
}

function drawCall(call, result) {
  return h("div.call", { role: "group", "aria-label": `Call of ${call.name}` },
    h("p", {}, "Calls ", h("code", {}, call.name)),
    h("div.call-parts", {}, codeBlock("json", tidied(call.arguments), "Arguments"), result));
}

function sentResult({ result }) {
  return h("div.result", {}, codeBlock(isJson(result) ? "json" : "text", tidied(result), "Result"));
}

/** Return JSON with its lines broken; what is none, such as a call that is still being written, as it is. */
function tidied(text) {
  return isJson(text) ? JSON.stringify(JSON.parse(text), null, 2) : text;
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
