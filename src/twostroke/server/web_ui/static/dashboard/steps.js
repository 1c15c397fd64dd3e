// The last steps of the engine as bars: the prefill and decode tokens that each computed.

import { h } from "../shared/dom.js";
import { count, counted, duration } from "../shared/format.js";
import { colours, prepare } from "./colours.js";
import { roundUp } from "./scale.js";

const HEIGHT = 132;
const MOST = 120; // steps that the server tells of

export class Steps {
  #canvas = h("canvas.chart", { role: "img", "aria-label": "Steps" });
  #top = h("span.axis-top");
  #readout = h("p.axis", { "aria-hidden": "true" });
  #steps = [];
  #pointed = null;

  constructor() {
    const keys = h("ul.keys", {}, h("li", {}, h("span.key.cool", { "aria-hidden": "true" }), "prefill tokens"), h("li", {}, h("span.key.warm", { "aria-hidden": "true" }), "decode tokens"));
    this.element = h("section.card", { "aria-label": "Steps" }, h("header", {}, h("h3", {}, "Engine steps"), keys), h("div.plot", {}, this.#top, this.#canvas), this.#readout);
    this.#canvas.addEventListener("pointermove", (event) => {
      this.#pointed = event.offsetX / this.#canvas.clientWidth;
      this.#draw();
    });
    this.#canvas.addEventListener("pointerleave", () => {
      this.#pointed = null;
      this.#draw();
    });
  }

  /** Show steps: rows, of them prompt rows, requests, seconds. */
  show(steps) {
    this.#steps = steps;
    this.#draw();
  }

  #draw() {
    const width = this.#canvas.clientWidth;
    if (!width) return;
    const [warm, cool, line, ink] = colours("--accent", "--cool", "--line", "--ink");
    const context = prepare(this.#canvas, width, HEIGHT);
    const top = roundUp(Math.max(4, ...this.#steps.map(([rows]) => rows)));
    this.#top.textContent = `${count(top)} tokens`;
    context.fillStyle = line;
    for (const share of [0, 0.5, 1]) context.fillRect(0, Math.min(share * HEIGHT, HEIGHT - 1), width, 1);
    const room = width / MOST;
    const offset = MOST - this.#steps.length;
    this.#steps.forEach(([rows, promptRows], index) => {
      const x = (offset + index) * room;
      const bar = Math.max(room - 1, 1);
      const whole = (rows / top) * HEIGHT;
      const prompt = (promptRows / top) * HEIGHT;
      context.fillStyle = warm;
      context.fillRect(x, HEIGHT - whole, bar, whole - prompt);
      context.fillStyle = cool;
      context.fillRect(x, HEIGHT - prompt, bar, prompt);
    });
    const place = this.#pointed === null ? -1 : Math.floor(this.#pointed * MOST) - offset;
    const step = this.#steps[place];
    if (step) {
      context.strokeStyle = ink;
      context.strokeRect((offset + place) * room, 0.5, Math.max(room - 1, 1), HEIGHT - 1);
    }
    this.#tell(step);
  }

  #tell(step) {
    const last = this.#steps.at(-1);
    if (step) this.#readout.replaceChildren(h("span", {}, sentence(step)));
    else this.#readout.replaceChildren(h("span", {}, `the last ${this.#steps.length} steps`), h("span", {}, last ? `latest ${duration(last[3])}` : ""));
    this.#canvas.setAttribute("aria-label", last ? `Tokens of the last ${this.#steps.length} steps. The latest: ${sentence(last)}.` : "No steps yet.");
  }
}

function sentence([rows, promptRows, requests, seconds]) {
  return `${counted(rows, "token")} (${count(promptRows)} prefill) of ${counted(requests, "request")} in ${duration(seconds)}`;
}
