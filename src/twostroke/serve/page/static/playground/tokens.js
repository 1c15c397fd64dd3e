// An answer token by token: the less likely a token was, the deeper its shade; each tells what else might have stood there.

import { h } from "../shared/dom.js";
import { percent } from "../shared/format.js";

const SHADES = [0.9, 0.7, 0.5, 0.3, 0.1]; // the probability below which the next shade begins

/** Draws tokens into an element, only the new ones each time. */
export class TokenView {
  #taken = 0;
  #pieces = [];
  #card;

  constructor() {
    this.#card = h("div.token-card", { role: "tooltip", id: `card-${TokenView.#next++}`, hidden: true });
    this.text = h("div.token-text", { role: "group", "aria-label": "Tokens; the arrow keys go from one to the next" });
    this.element = h("div.tokens", {}, legend(), this.text, this.#card);
    this.text.addEventListener("mouseover", (event) => this.#show(event.target));
    this.text.addEventListener("mouseleave", () => this.#hide());
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
    const piece = this.#pieces[Number(element.dataset.place)];
    this.#card.replaceChildren(...piece.tokens.map(drawCard));
    this.#card.hidden = false;
    element.setAttribute("aria-describedby", this.#card.id);
    this.#place(element);
  }

  #place(element) {
    const whole = this.element.getBoundingClientRect();
    const line = element.getClientRects()[0];
    const left = Math.min(line.left - whole.left, whole.width - this.#card.offsetWidth);
    this.#card.style.left = `${Math.max(left, 0)}px`;
    this.#card.style.top = `${line.bottom - whole.top + 4}px`;
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

/**
 * Yield pieces of whole characters, each with its tokens.
 *
 * A token may be a part of a character, so bytes decide: tokens belong together until their bytes
 * are UTF-8. `open` is the last piece so far; if it waits for more, it is yielded again.
 */
function* toPieces(tokens, open) {
  let piece = open?.isOpen ? open : null;
  for (const token of tokens) {
    piece ??= { tokens: [], text: "", isOpen: true };
    piece.tokens.push(token);
    const bytes = Uint8Array.from(piece.tokens.flatMap((one) => one.bytes ?? [...new TextEncoder().encode(one.token)]));
    const text = decode(bytes);
    piece.isOpen = text === null && piece.tokens.length < 8;
    piece.text = text ?? "�";
    if (!piece.isOpen) {
      yield piece;
      piece = null;
    }
  }
  if (piece) yield piece;
}

function decode(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return null;
  }
}

function drawPiece(piece, place) {
  const least = Math.min(...piece.tokens.map((token) => Math.exp(token.logprob)));
  const shade = SHADES.filter((limit) => least < limit).length;
  const label = `${visible(piece.text)}, ${percent(least)}`;
  return h(`span.token.shade-${shade}`, { role: "button", "data-place": place, tabindex: "-1", "aria-label": label }, piece.text);
}

function drawCard(token) {
  const others = (token.top_logprobs ?? []).map((other) => {
    const isOwn = String(other.bytes) === String(token.bytes);
    const share = Math.exp(other.logprob);
    const bar = h("span.bar-of", { "aria-hidden": "true" }, h("span"));
    bar.firstChild.style.width = `${Math.round(share * 100)}%`;
    return h(`li${isOwn ? ".own" : ""}`, {}, h("code", {}, spell(other)), bar, h("span.share", {}, percent(share)));
  });
  const own = h("p", {}, h("code", {}, spell(token)), h("span", {}, ` ${percent(Math.exp(token.logprob))}, log-probability ${token.logprob.toFixed(2)}`));
  return h("div", {}, own, h("ol", {}, others));
}

/** Return how a token looks, its bytes where it is no text. */
function spell({ token, bytes }) {
  const text = bytes ? decode(Uint8Array.from(bytes)) : token;
  if (text === null) return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return visible(text);
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";
}

function legend() {
  const names = ["over 90 %", "", "", "", "", "under 10 %"];
  return h("p.legend", {}, "How likely each token was: ", names.map((name, shade) => h("span", {}, h(`span.swatch.shade-${shade}`, { "aria-hidden": "true" }), name)));
}
