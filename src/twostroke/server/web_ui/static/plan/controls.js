// What a plan is asked: sliders for the load, lists for formats and devices, fields for objectives.

import { h } from "../shared/dom.js";
import { count, percent } from "../shared/format.js";

const MOST_TOKENS = 1 << 20; // that the server plans for
const MOST_STREAMS = 1 << 14;
const MOST_DEVICES = 64;
const PER_OCTAVE = 4;
const AUTO = 0; // streams: as many as meet the objective, or up to 256

export class Controls {
  #fields = {};
  #onChange;

  /** `choices` are the server's; `onChange` is called after each change. */
  constructor(choices, onChange) {
    this.#onChange = onChange;
    const tokens = scale(1, Math.min(choices.context_length, MOST_TOKENS));
    const here = choices.here ? [["here", `this machine (${choices.here})`]] : [];
    const devices = choices.devices.map(({ name, memory_bytes: bytes }) => [name, bytes ? `${name}, ${Math.round(bytes / 1e9)} GB` : name]);
    const own = [["", `as they are (${choices.stored})`]];
    const names = (list) => list.map((name) => [name, name]);
    const most = tokens.at(-1);
    this.element = h(
      "form.panel.plan-controls",
      { "aria-label": "Scenario", novalidate: true },
      this.#group("Load",
        this.#slider("prompt", "Prompt", tokens, Math.min(1024, most / 2), (value) => `${count(value)} tokens`),
        this.#slider("output", "Output", tokens, Math.min(256, most / 4), (value) => `${count(value)} tokens`),
        this.#slider("cached", "Prefix cache hit rate", shares(), 0, percent),
        this.#slider("streams", "Streams", [AUTO, ...scale(1, MOST_STREAMS)], AUTO, (value) => (value === AUTO ? "as many as useful" : count(value))),
      ),
      this.#group("Device",
        this.#list("device", "Device", [...here, ...devices]),
        this.#slider("count", "Devices", scale(1, MOST_DEVICES), 1, count),
      ),
      this.#group("Formats",
        this.#list("weights", "Weights", [...own, ...names(choices.weights)]),
        this.#list("kv_format", "KV cache", names(choices.kv_formats), choices.kv_format),
      ),
      this.#group("Objectives, in ms",
        this.#number("ttft_s", "TTFT"),
        this.#number("tpot_s", "TPOT"),
      ),
    );
    this.element.addEventListener("submit", (event) => event.preventDefault());
  }

  /** Return the fields of the request. */
  fields() {
    const found = Object.fromEntries(Object.entries(this.#fields).map(([name, read]) => [name, read()]));
    return Object.fromEntries(Object.entries(found).filter(([, value]) => value !== null));
  }

  #group(title, ...cells) {
    return h("fieldset.group", {}, h("legend", {}, title), h("div.grid", {}, cells));
  }

  /** A slider over a list of values, which moves in equal steps whatever they are. */
  #slider(name, label, values, start, say) {
    const id = `plan-${name}`;
    const place = values.findLastIndex((value) => value <= start);
    const shown = h("output", { for: id });
    const range = h("input", { id, type: "range", min: 0, max: values.length - 1, step: 1, value: Math.max(place, 0) });
    const show = () => {
      shown.textContent = say(values[range.valueAsNumber]);
      range.setAttribute("aria-valuetext", shown.textContent);
    };
    range.addEventListener("input", () => {
      show();
      this.#onChange();
    });
    show();
    this.#fields[name] = () => (name === "streams" && range.valueAsNumber === 0 ? null : values[range.valueAsNumber]);
    return h("div.cell.wide-cell", {}, h("div.slider-head", {}, h("label", { for: id }, label), shown), range);
  }

  #list(name, label, options, start = options[0]?.[0]) {
    const id = `plan-${name}`;
    const select = h("select", { id, onchange: () => this.#onChange() }, options.map(([word, text]) => h("option", { value: word }, text)));
    select.value = start;
    this.#fields[name] = () => select.value || null;
    return h("div.cell.wide-cell", {}, h("label", { for: id }, label), select);
  }

  #number(name, label) {
    const id = `plan-${name}`;
    const input = h("input", { id, type: "number", inputmode: "decimal", min: 0, step: "any", placeholder: "none" });
    const isWrong = () => input.validity.badInput || (input.value !== "" && !(input.valueAsNumber > 0));
    input.addEventListener("input", () => {
      input.setAttribute("aria-invalid", String(isWrong()));
      if (!isWrong()) this.#onChange();
    });
    this.#fields[name] = () => (input.value === "" || isWrong() ? null : input.valueAsNumber / 1000);
    return h("div.cell", {}, h("label", { for: id }, label), input);
  }
}

/** Return numbers from one to another, some to an octave, the larger ones in round steps. */
function scale(least, most) {
  const found = new Set([least]);
  for (let power = 0; least * 2 ** (power / PER_OCTAVE) < most; power += 1) {
    const value = least * 2 ** (power / PER_OCTAVE);
    const step = 2 ** Math.max(0, Math.floor(Math.log2(value)) - 2);
    found.add(Math.round(value / step) * step);
  }
  return [...found.add(most)].filter((value) => value <= most);
}

function shares() {
  return Array.from({ length: 20 }, (_, place) => place / 20);
}
