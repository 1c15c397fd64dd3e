// An answer token by token: the less likely a token was, the deeper its shade; each tells what else might have stood there.

import { h } from "../shared/dom.js";
import { cardOf, labelOf, legend, placeCard, shadeOf, toPieces } from "./pieces.js";
import { ShadedMarkdown } from "./shading.js";

/**
 * Draws tokens into an element, only the new ones each time.
 *
 * `lead` is text before them that has none. The text is drawn as Markdown, unless it `isRaw`.
 */
export class TokenView {
  #taken = 0;
  #pieces = [];
  #card;
  #markdown = null;

  constructor(lead, { isRaw = false } = {}) {
    this.#card = h("div.token-card", { role: "tooltip", id: `card-${TokenView.#next++}`, hidden: true });
    this.text = h(isRaw ? "div.token-text" : "div.token-text.markdown", { role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
    this.element = h("div.tokens", {}, legend(), h("div.token-lead", { hidden: !isRaw || lead === "" }, isRaw ? lead : ""), this.text, this.#card);
    if (!isRaw) this.#markdown = new ShadedMarkdown(this.text, lead.length, (place, part) => this.#draw(place, part));
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

  /** Show the tokens of a text that are new. */
  update(tokens, text) {
    const first = this.#pieces.length - Boolean(this.#pieces.at(-1)?.isOpen); // that may have changed
    for (const piece of toPieces(tokens.slice(this.#taken), this.#pieces.at(-1))) {
      if (piece !== this.#pieces.at(-1)) this.#pieces.push(piece);
    }
    this.#taken = tokens.length;
    if (this.#markdown) this.#markdown.update(text, this.#pieces);
    else this.#append(first);
    const [next] = this.#tokens;
    if (next && !this.text.querySelector('[tabindex="0"]')) next.tabIndex = 0;
  }

  /** Draw the pieces from `first` on as they are. */
  #append(first) {
    while (this.text.children.length > first) this.text.lastChild.remove();
    for (let place = first; place < this.#pieces.length; place += 1) this.text.append(this.#draw(place, this.#pieces[place].text));
  }

  #draw(place, text) {
    const piece = this.#pieces[place];
    return h(`span.token.${shadeOf(piece)}`, { role: "button", "data-place": place, tabindex: "-1", "aria-label": labelOf(piece) }, text);
  }

  get #tokens() {
    return [...this.text.querySelectorAll(".token")];
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
    const tokens = this.#tokens;
    const index = tokens.indexOf(here);
    const goals = { ArrowRight: tokens[index + 1], ArrowLeft: tokens[index - 1], Home: tokens[0], End: tokens.at(-1) };
    const goal = goals[event.key];
    if (!goal) return;
    event.preventDefault();
    here.tabIndex = -1;
    goal.tabIndex = 0;
    goal.focus();
  }
}
