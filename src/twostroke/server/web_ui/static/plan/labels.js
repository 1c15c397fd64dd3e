// Labels of a plot that lie neither on each other nor on its marks.

import { svg } from "../shared/dom.js";

const HEIGHT = 13; // pixels of a line of text
const CHARACTER = 6;

export class Labels {
  #boxes = [];
  #right;

  /** Keep labels left of `right`, in pixels. */
  constructor(right) {
    this.#right = right;
  }

  /** Keep labels off a mark. */
  avoid({ x, y }) {
    this.#boxes.push({ left: x - CHARACTER, width: 2 * CHARACTER, base: y + 4 });
  }

  /** Return a text at a place, or the next free one above (`up` 1) or below it (-1). */
  text(words, { x, y, kind, isEnd = false, up = -1 }) {
    const width = words.length * CHARACTER;
    const left = isEnd ? Math.max(x - width, 0) : Math.min(x, this.#right - width);
    let base = y;
    const isTaken = (box) => left < box.left + box.width && box.left < left + width && Math.abs(base - box.base) < HEIGHT;
    while (this.#boxes.some(isTaken)) base -= HEIGHT * up;
    this.#boxes.push({ left, width, base });
    return svg("text", { class: `mark-label ${kind}`, x: isEnd ? left + width : left, y: base, "text-anchor": isEnd ? "end" : "start" }, words);
  }
}
