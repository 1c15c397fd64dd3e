// Guessing ahead: of the tokens that each source proposed, how many were right.

import { h } from "../shared/dom.js";
import { count, percent } from "../shared/format.js";

export class Guesses {
  #list = h("ul.guesses");
  #note = h("p.summary");

  constructor() {
    this.element = h("section.card", { "aria-label": "Guessing ahead" }, h("header", {}, h("h3", {}, "Guessing ahead")), this.#list, this.#note);
  }

  show(found, engine) {
    const busy = Object.entries(found).filter(([, { proposed }]) => proposed > 0);
    const items = busy.map(([source, { proposed, accepted }]) => {
      const share = accepted / proposed;
      const bar = h("span.bar-of", { "aria-hidden": "true" }, h("span"));
      bar.firstChild.style.width = `${Math.round(share * 100)}%`;
      return h("li", {}, h("span", {}, source), bar, h("span.share", {}, `${count(accepted)} of ${count(proposed)} right, ${percent(share)}`));
    });
    this.#list.replaceChildren(...items);
    const who = engine.speculation?.length ? `Can guess: ${engine.speculation.join(", ")}${engine.draft ? ` (draft: ${engine.draft})` : ""}.` : "Speculation is off on this server.";
    this.#note.textContent = items.length ? who : `No guesses in this time. ${who}`;
  }
}
