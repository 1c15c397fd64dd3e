// Speculative decoding: of the tokens that each source proposed, how many were accepted.

import { h } from "../shared/dom.js";
import { count, percent } from "../shared/format.js";

export class Drafts {
  #list = h("ul.drafts");
  #note = h("p.summary");

  constructor() {
    this.element = h("section.card", { "aria-label": "Speculative decoding" }, h("header", {}, h("h3", {}, "Speculative decoding")), this.#list, this.#note);
  }

  show(found, engine) {
    const busy = Object.entries(found).filter(([, { proposed }]) => proposed > 0);
    const items = busy.map(([source, { proposed, accepted }]) => {
      const share = accepted / proposed;
      const bar = h("span.bar-of", { "aria-hidden": "true" }, h("span"));
      bar.firstChild.style.width = `${Math.round(share * 100)}%`;
      return h("li", {}, h("span", {}, source), bar, h("span.share", {}, `${count(accepted)} of ${count(proposed)} accepted, ${percent(share)}`));
    });
    this.#list.replaceChildren(...items);
    const who = engine.speculation?.length ? `Draft tokens from ${engine.speculation.join(", ")}${engine.draft ? ` (draft model: ${engine.draft})` : ""}.` : "Speculation is off on this server.";
    this.#note.textContent = items.length ? who : `No draft tokens in this time range. ${who}`;
  }
}
