// A chart of some lines over the last two minutes, with the values at the pointer.

import { h, svg } from "../shared/dom.js";
import { SPAN_S } from "./history.js";
import { roundUp, toPath } from "./scale.js";

const HEIGHT = 132;

/** `series` is a list of {name, kind, format}: `kind` names the line's colour in the style sheet. */
export class Chart {
  #series;
  #history;
  #format;
  #lines;
  #values;
  #top = h("span.axis-top");
  #cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
  #svg;
  #pointed = null; // where the pointer is, as a share of the width

  constructor(title, series, history, format) {
    this.#series = series;
    this.#history = history;
    this.#format = format;
    this.#lines = series.map(({ kind }) => svg("path", { class: `line ${kind}`, fill: "none" }));
    this.#values = series.map(() => h("b"));
    const legend = series.map(({ name, kind }, index) => h("li", {}, h(`span.key.${kind}`, { "aria-hidden": "true" }), `${name} `, this.#values[index]));
    this.#svg = svg("svg", { class: "chart", height: HEIGHT, role: "img", "aria-label": title }, grid(), ...this.#lines, this.#cursor);
    const axis = h("p.axis", { "aria-hidden": "true" }, h("span", {}, "2 min ago"), h("span", {}, "now"));
    this.element = h("section.card", { "aria-label": title }, h("header", {}, h("h3", {}, title), h("ul.keys", {}, legend)), h("div.plot", {}, this.#top, this.#svg), axis);
    this.#svg.addEventListener("pointermove", (event) => {
      const box = this.#svg.getBoundingClientRect();
      this.#pointed = (event.clientX - box.left) / box.width;
      this.update();
    });
    this.#svg.addEventListener("pointerleave", () => {
      this.#pointed = null;
      this.update();
    });
    this.title = title;
  }

  update() {
    const width = this.#svg.clientWidth;
    if (!width) return;
    const lines = this.#series.map(({ name }) => this.#history.line(name));
    const most = Math.max(0, ...lines.flat().map(([, value]) => value ?? 0));
    const top = roundUp(Math.max(most, 1));
    this.#top.textContent = this.#format(top);
    lines.forEach((points, index) => {
      this.#lines[index].setAttribute("d", toPath(points, { width, height: HEIGHT, span_s: SPAN_S, top }));
    });
    this.#showValues(lines, width);
    const said = this.#series.map(({ name }, index) => `${name}: now ${this.#format(lines[index].at(-1)?.[1])}, at most ${this.#format(Math.max(0, ...lines[index].map(([, value]) => value ?? 0)))}`);
    this.#svg.setAttribute("aria-label", `${this.title}, last two minutes. ${said.join(". ")}.`);
  }

  #showValues(lines, width) {
    const ago_s = this.#pointed === null ? 0 : (1 - this.#pointed) * SPAN_S;
    lines.forEach((points, index) => {
      const near = points.reduce((best, point) => (Math.abs(point[0] - ago_s) < Math.abs((best?.[0] ?? Infinity) - ago_s) ? point : best), null);
      this.#values[index].textContent = this.#format(near?.[1]);
    });
    const isPointed = this.#pointed !== null;
    this.#cursor.setAttribute("visibility", isPointed ? "visible" : "hidden");
    if (isPointed) {
      for (const end of ["x1", "x2"]) this.#cursor.setAttribute(end, (this.#pointed * width).toFixed(1));
    }
  }
}

function grid() {
  return [0, 0.5, 1].map((share) => svg("line", { class: "grid-line", x1: "0", x2: "100%", y1: share * HEIGHT, y2: share * HEIGHT }));
}
