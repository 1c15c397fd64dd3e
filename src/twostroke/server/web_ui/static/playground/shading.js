// Shades the tokens of a text that is drawn as Markdown. Marks, such as asterisks, are not shown.

import { draw } from "../markdown/draw.js";

const FOREIGN = "figcaption, button"; // not of the text

/** Draws a growing text into `place`; `drawPart(index, letters)` draws a part of a piece. */
export class ShadedMarkdown {
  #place;
  #drawPart;
  #numTaken = 0; // pieces
  #starts = []; // where pieces begin in the text
  #indices = []; // which pieces these are
  #end; // of the last of them
  #shaded = new WeakMap(); // element -> where the pieces ended when it was shaded

  /** Pieces begin after `lead` letters. */
  constructor(place, lead, drawPart) {
    this.#place = place;
    this.#drawPart = drawPart;
    this.#end = lead;
  }

  update(text, pieces) {
    this.#locate(text, pieces);
    let at = 0;
    draw(this.#place, text).forEach((source, index) => {
      const element = this.#place.children[index];
      const start = text.indexOf(source, at);
      at = start + source.length;
      if (this.#shaded.get(element) >= Math.min(at, this.#end)) return;
      this.#shade(element, text.slice(0, at), start);
      this.#shaded.set(element, this.#end);
    });
  }

  /** Find new pieces in the text; some are not there, such as the marks of reasoning. */
  #locate(text, pieces) {
    for (const piece of pieces.slice(this.#numTaken)) {
      if (piece.isOpen) return; // the rest of a character is to come
      if (piece.text !== "" && text.startsWith(piece.text, this.#end)) {
        this.#starts.push(this.#end);
        this.#indices.push(this.#numTaken);
        this.#end += piece.text.length;
      }
      this.#numTaken += 1;
    }
  }

  /** Cut the shown letters of an element into parts; `text` ends with the element's. */
  #shade(element, text, start) {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
    const nodes = [];
    while (walker.nextNode()) nodes.push(walker.currentNode);
    let at = start;
    for (const node of nodes) {
      const { parentElement } = node;
      if (parentElement.closest(FOREIGN)) continue;
      const places = placesOf(node.data, text, at);
      if (!places.length) continue;
      at = places.at(-1) + 1;
      if (!parentElement.closest(".token")) node.replaceWith(...this.#parts(node.data, places));
    }
  }

  *#parts(letters, places) {
    const pieces = places.map((place) => this.#pieceAt(place));
    let begin = 0;
    for (let end = 1; end <= letters.length; end += 1) {
      if (end < letters.length && pieces[end] === pieces[begin]) continue;
      const part = letters.slice(begin, end);
      yield pieces[begin] === undefined ? part : this.#drawPart(pieces[begin], part);
      begin = end;
    }
  }

  /** Return the index of the piece at a place in the text, if one is known. */
  #pieceAt(place) {
    if (place >= this.#end) return undefined;
    let low = 0;
    let high = this.#starts.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.#starts[middle] <= place) low = middle + 1;
      else high = middle;
    }
    return this.#indices[low - 1];
  }
}

/** Return where each letter is in `text` from `at` on, if need be with others between; [] if nowhere. */
function placesOf(letters, text, at) {
  const whole = text.indexOf(letters, at);
  if (whole >= 0) return Array.from({ length: letters.length }, (_, index) => whole + index);
  const places = [];
  let place = at;
  for (const letter of letters.split("")) {
    place = text.indexOf(letter, place);
    if (place < 0) return [];
    places.push(place);
    place += 1;
  }
  return places;
}
