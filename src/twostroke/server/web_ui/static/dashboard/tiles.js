// The figures at the top, each with its last two minutes as a thin line.

import { h, svg } from "../shared/dom.js";
import { SPAN_S } from "./history.js";
import { roundUp, toPath } from "./scale.js";

const SIZE = { width: 100, height: 24, span_s: SPAN_S };

export class Tile {
  #value = h("dd.value");
  #note = h("dd.note");
  #path = svg("path", { class: "spark", fill: "none", "vector-effect": "non-scaling-stroke" });

  constructor(name, explanation = null) {
    const label = explanation ? h("abbr", { title: explanation }, name) : name;
    const line = svg("svg", { viewBox: `0 -1 ${SIZE.width} ${SIZE.height + 2}`, preserveAspectRatio: "none", "aria-hidden": "true" }, this.#path);
    this.element = h("div.tile", {}, h("dt", {}, label), this.#value, this.#note);
    this.element.append(h("dd.line", { "aria-hidden": "true" }, line));
  }

  /** Show a value as text, a note below it, and its past. */
  show(value, note, points = []) {
    this.#value.textContent = value;
    this.#note.textContent = note;
    const top = roundUp(Math.max(...points.map(([, one]) => one ?? 0), 0));
    this.#path.setAttribute("d", toPath(points, { ...SIZE, top }));
  }
}
