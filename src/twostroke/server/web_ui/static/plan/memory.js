// How the devices' memory is used: weights, keys and values, the rest.

import { h } from "../shared/dom.js";
import { counted, quantity } from "../shared/format.js";

const RESERVED = 0.1; // of the memory: for the values of a step and the runtime

export class MemoryBar {
  #bar = h("div.memory-bar", { "aria-hidden": "true" });
  #keys = h("ul.keys");

  constructor() {
    this.element = h("section.card", { "aria-label": "Memory" }, h("header", {}, h("h3", {}, "Memory"), this.#keys), this.#bar);
  }

  show({ memory, shown }) {
    const parts = partsOf(memory, shown);
    const whole = parts.reduce((sum, [, bytes]) => sum + bytes, 0);
    const pieces = parts.map(([, bytes, kind]) => {
      const piece = h(`span.memory-${kind}`);
      piece.style.width = `${((bytes / whole) * 100).toFixed(2)}%`;
      return piece;
    });
    this.#bar.replaceChildren(...pieces);
    this.#keys.replaceChildren(...parts.map(([name, bytes, kind]) => h("li", {}, h(`span.key.memory-${kind}`, { "aria-hidden": "true" }), `${name} `, h("b", {}, quantity(bytes, "B")))));
  }
}

function partsOf({ usable, weights, kv_per_request: request }, streams) {
  const cache = request * streams;
  const parts = [
    ["weights", weights, "weights"],
    [`keys and values of ${counted(streams, "request")}`, cache, "cache"],
  ];
  if (usable === null) return parts;
  const free = usable - weights - cache;
  if (free < 0) return parts; // it does not fit, as the verdict says
  return [...parts, ["free", free, "free"], ["for a step and the runtime", (usable / (1 - RESERVED)) * RESERVED, "reserved"]];
}
