// A field of text in which what the model wrote is marked: a plain text area over a drawing of the marks.

import { h } from "../shared/dom.js";
import { piecesOf, unifyLines } from "./marks.js";
import { cardOf, placeCard, shadeOf } from "./pieces.js";

const MOVES = new Set(["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown", "Home", "End", "PageUp", "PageDown"]);

/** Draws a text with its marks; `onEdit(value, caret)` is called after each edit. */
export class Pad {
  #marks = h("div.pad-marks", { "aria-hidden": "true" });
  #own = h("span"); // the text that is settled
  #live = h("span.written"); // the choice that may still grow
  #card = h("div.token-card", { role: "status", hidden: true });
  #spans = []; // {start, end, piece, element}, in order
  #ownSpans = 0; // how many of them are settled
  #prompt = "";
  #drawn = 0; // letters of the choice
  #lit = null; // the token whose card is shown

  constructor(id, label, onEdit) {
    this.area = h("textarea", { id, "aria-label": label, spellcheck: "false", autocomplete: "off", autocapitalize: "off" });
    this.#marks.append(this.#own, this.#live, "\u200b"); // the last line has its height, also when it is empty
    this.element = h("div.pad", {}, this.#marks, this.area, this.#card);
    this.area.addEventListener("input", () => {
      this.#hide();
      onEdit(this.area.value, this.area.selectionStart);
    });
    this.area.addEventListener("mousemove", (event) => this.#point(event));
    this.area.addEventListener("mouseleave", () => this.#hide());
    this.area.addEventListener("click", () => this.#showAtCaret());
    this.area.addEventListener("keyup", (event) => MOVES.has(event.key) && this.#showAtCaret());
    this.area.addEventListener("keydown", (event) => event.key === "Escape" && this.#hide());
    this.area.addEventListener("blur", () => this.#hide());
  }

  /** Whether any mark tells how likely its tokens were. */
  get hasShades() {
    return this.#spans.length > 0;
  }

  /** Draw a turn's text and the choice behind it. */
  show({ prompt, marks }, choice) {
    this.#spans = [];
    this.#hide();
    let place = 0;
    const parts = [];
    for (const mark of marks) {
      parts.push(prompt.slice(place, mark.start));
      const pieces = (mark.pieces ?? []).map((piece) => ({ ...piece, start: mark.base + piece.start, end: mark.base + piece.end }));
      parts.push(h("span.written", {}, this.#drawPieces(prompt, mark.start, mark.end, pieces)));
      place = mark.end;
    }
    parts.push(prompt.slice(place));
    this.#own.replaceChildren(...parts);
    this.#ownSpans = this.#spans.length;
    this.#live.replaceChildren();
    this.#drawn = 0;
    this.#prompt = prompt;
    this.grow(choice);
  }

  /** Draw what is new of the choice. */
  grow(choice) {
    const text = choice?.text ?? "";
    const value = this.#prompt + text;
    const shown = unifyLines(value);
    if (this.area.value !== shown) this.#put(shown);
    if (!choice?.tokens?.length) {
      this.#live.textContent = text;
      return;
    }
    const pieces = piecesOf(choice).map((piece) => ({ ...piece, start: this.#prompt.length + piece.start, end: this.#prompt.length + piece.end }));
    this.#dropLast();
    const from = this.#prompt.length + this.#drawn;
    this.#live.append(...this.#drawPieces(value, from, value.length, pieces.filter((piece) => piece.start >= from)));
    this.#drawn = text.length;
  }

  /** The last piece may have grown since: it is drawn again. */
  #dropLast() {
    if (this.#spans.length === this.#ownSpans) {
      this.#live.replaceChildren();
      this.#drawn = 0;
      return;
    }
    const last = this.#spans.pop();
    while (last.element.nextSibling) last.element.nextSibling.remove();
    last.element.remove();
    this.#drawn = last.start - this.#prompt.length;
  }

  #drawPieces(text, start, end, pieces) {
    const parts = [];
    let place = start;
    for (const piece of pieces) {
      if (piece.start < place || piece.end > end) continue; // an edit has gone through it
      parts.push(text.slice(place, piece.start));
      const element = h(`span.token.${shadeOf(piece)}`, {}, text.slice(piece.start, piece.end));
      this.#spans.push({ start: piece.start, end: piece.end, piece, element });
      parts.push(element);
      place = piece.end;
    }
    return [...parts, text.slice(place, end)];
  }

  /** Change the whole text; where the caret was, it stays. */
  #put(value) {
    const { area } = this;
    const { selectionStart, selectionEnd } = area;
    const isAtEnd = selectionStart === area.value.length;
    area.value = value;
    if (!isAtEnd) area.setSelectionRange(selectionStart, selectionEnd);
  }

  /** The text area is over the marks, so the pointer's token has to be looked for. */
  #point({ clientX, clientY }) {
    const element = document.elementsFromPoint(clientX, clientY).find((one) => one.classList.contains("token"));
    const span = element && this.#spans.find((one) => one.element === element);
    if (span) this.#showCard(span);
    else this.#hide();
  }

  #showAtCaret() {
    const { selectionStart: place, selectionEnd } = this.area;
    const span = place === selectionEnd && this.#spans.find(({ start, end }) => start <= place && place < end);
    if (span) this.#showCard(span);
    else this.#hide();
  }

  #showCard({ piece, element }) {
    if (this.#lit === element) return;
    this.#hide();
    this.#lit = element;
    element.classList.add("lit");
    this.#card.hidden = false;
    this.#card.replaceChildren(...cardOf(piece));
    placeCard(this.#card, element, this.element);
  }

  #hide() {
    this.#lit?.classList.remove("lit");
    this.#lit = null;
    this.#card.hidden = true;
  }
}
