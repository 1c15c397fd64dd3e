// The models of one server that come into memory when they are asked for; a click shows one's figures.

import { h } from "../shared/dom.js";
import { count, duration, quantity } from "../shared/format.js";

const HEADS = [
  ["Model"],
  ["State"],
  ["Memory", "Memory that the model uses while it is loaded"],
  ["Queued", "Requests that wait until the model is loaded"],
  ["Loads"],
  ["Load time", "Duration of the last load"],
];

export class Models {
  #body = h("tbody");
  #onChoose;

  /** `onChoose` is called with the name of the model whose figures are wanted. */
  constructor(onChoose) {
    this.#onChoose = onChoose;
    const heads = HEADS.map(([name, long]) => h("th", { scope: "col" }, long ? h("abbr", { title: long }, name) : name));
    const table = h("table.data", {}, h("thead", {}, h("tr", {}, heads)), this.#body);
    this.element = h(
      "section.card",
      { "aria-label": "Models", hidden: true },
      h("header", {}, h("h3", {}, "Models")),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Models" }, table),
      h("p.summary", {}, "The dashboard shows the marked model."),
    );
  }

  /** Show the models, `shown` of which is the one that the page is about; a server of one has none. */
  show(models, shown) {
    this.element.hidden = !models.length;
    const focused = this.element.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.#body.replaceChildren(...models.map((one) => this.#row(one, one.name === shown)));
    if (focused) [...this.#body.querySelectorAll("button")].find((one) => one.textContent === focused)?.focus();
  }

  #row({ name, state, num_bytes: size, num_waiting: waiting, loads, load_s: seconds }, isShown) {
    const button = h("button.plain", { type: "button", "aria-pressed": String(isShown), onclick: () => this.#onChoose(name) }, name);
    const cells = [state, quantity(size, "B"), count(waiting), count(loads), duration(loads ? seconds : undefined)];
    return h("tr", {}, h("th", { scope: "row" }, button), cells.map((cell) => h("td", {}, cell)));
  }
}
