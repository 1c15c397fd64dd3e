// An answer token by token: the less likely a token was, the deeper its shade; each tells what else might have stood there.

import { h } from "../shared/dom.js";
import { cardOf, labelOf, legend, placeCard, shadeOf, toPieces } from "./pieces.js";

/** Draws tokens into an element, only the new ones each time; `lead` is text before them that has none. */
export class TokenView {
  #taken = 0;
  #pieces = [];
  #card;

  constructor(lead = "") {
    this.#card = h("div.token-card", { role: "tooltip", id: `card-${TokenView.#next++}`, hidden: true });
    this.text = h("div.token-text", { role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
    this.element = h("div.tokens", {}, legend(), h("div.token-lead", { hidden: lead === "" }, lead), this.text, this.#card);
    this.text.addEventListener("mouseover", (event) => this.#show(event.target));
    this.text.addEventListener("pointerleave", ({ pointerType }) => {
      if (pointerType === "mouse") this.#hide(); // a finger leaves as soon as it has touched
    });
    this.text.addEventListener("focusin", (event) => this.#show(event.target));
    this.text.addEventListener("focusout", () => this.#hide());
    this.text.addEventListener("click", (event) => this.#show(event.target));
    this.text.addEventListener("keydown", (event) => this.#walk(event));
  }

  static #next = 1;

  /** Show the tokens that are new. */
  update(tokens) {
    for (const piece of toPieces(tokens.slice(this.#taken), this.#pieces.at(-1))) {
      const known = this.#pieces.indexOf(piece);
      const element = drawPiece(piece, known < 0 ? this.#pieces.length : known);
      if (known >= 0) this.text.children[known].replaceWith(element);
      else {
        this.#pieces.push(piece);
        this.text.append(element);
      }
    }
    this.#taken = tokens.length;
    if (this.text.firstChild && !this.text.querySelector('[tabindex="0"]')) this.text.firstChild.tabIndex = 0;
  }

  #show(target) {
    const element = target.closest?.(".token");
    if (!element) return;
    this.#card.replaceChildren(...cardOf(this.#pieces[Number(element.dataset.place)]));
    this.#card.hidden = false;
    element.setAttribute("aria-describedby", this.#card.id);
    placeCard(this.#card, element, this.element);
  }

  #hide() {
    this.#card.hidden = true;
  }

  #walk(event) {
    const here = event.target.closest(".token");
    if (event.key === "Escape") this.#hide();
    const goals = { ArrowRight: here?.nextSibling, ArrowLeft: here?.previousSibling, Home: this.text.firstChild, End: this.text.lastChild };
    const goal = goals[event.key];
    if (!goal) return;
    event.preventDefault();
    here.tabIndex = -1;
    goal.tabIndex = 0;
    goal.focus();
  }
}

function drawPiece(piece, place) {
  return h(`span.token.${shadeOf(piece)}`, { role: "button", "data-place": place, tabindex: "-1", "aria-label": labelOf(piece) }, piece.text);
}
