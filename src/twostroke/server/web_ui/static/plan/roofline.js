// Both strokes of a plan under the roof of its devices, with the operations that take most time.

import { h, svg } from "../shared/dom.js";
import { count, counted, duration, percent, quantity, rate } from "../shared/format.js";
import { decade, grid, logAxes } from "../shared/logaxes.js";
import { Labels } from "./labels.js";

const SIZE = { height: 320, left: 52, right: 12, top: 26, bottom: 36 };
const LEAST_SHARE = 0.01; // of a step: operations below it are not drawn
const LEAST_NAMED = 0.05; // of a step: smaller ones have their names in tooltips alone
const NEAR = 1.15; // operations whose places differ less share a mark

export class RooflinePlot {
  #plot = svg("svg", { class: "roofline plan-plot", role: "img", "aria-label": "Roofline" });
  #note = h("p.summary");

  constructor() {
    const keys = ["prefill", "decode"].map((name) => h("li", {}, h(`span.key.${name === "prefill" ? "cool" : "warm"}`, { "aria-hidden": "true" }), name));
    this.element = h("section.card", { "aria-label": "Roofline" }, h("header", {}, h("h3", {}, "Prefill and decode under the roofline"), h("ul.keys", {}, keys)), this.#plot, this.#note);
  }

  show(plan) {
    const { peak, bandwidth } = plan.roof;
    const strokes = [
      { name: `prefill of ${count(plan.question.prompt)} tokens`, kind: "cool", ...marksOf(plan.prefill) },
      { name: `decode of ${counted(plan.shown, "stream")}`, kind: "warm", ...marksOf(plan.decode) },
    ];
    const size = { ...SIZE, width: this.#plot.clientWidth || 520 };
    const marks = strokes.flatMap((stroke) => stroke.marks);
    const ridge = peak / bandwidth;
    const axes = logAxes(size, {
      from: decade(Math.min(ridge / 10, ...marks.map((mark) => mark.intensity)), Math.floor),
      to: decade(Math.max(ridge * 4, ...marks.map((mark) => mark.intensity * 1.5)), Math.ceil),
      low: decade(Math.min(peak / 30, ...marks.map((mark) => mark.rate / 1.5)), Math.floor),
      high: peak * 6,
    });
    const { x, y } = axes;
    const labels = new Labels(size.width);
    for (const mark of marks) labels.avoid({ x: x(mark.intensity), y: y(mark.rate) });
    const roof = `M${x(Math.max(axes.from, axes.low / bandwidth))} ${y(Math.max(axes.from * bandwidth, axes.low))}L${x(ridge)} ${y(peak)}L${x(axes.to)} ${y(peak)}`;
    this.#plot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.#plot.replaceChildren(
      ...grid(axes, { x: "FLOP per byte", y: "FLOP/s" }),
      svg("path", { class: "roof", d: roof, fill: "none" }),
      ...strokes.flatMap((stroke) => drawn(stroke, axes, labels)),
    );
    const told = strokes.map(({ name, seconds, marks: [first] }) => `${name}: ${duration(seconds)}${first ? `, ${percent(first.share)} of it in ${nameOf(first)} at ${rate(first.intensity)} FLOP a byte` : ""}`);
    this.#plot.setAttribute("aria-label", `Roofline on logarithmic axes. ${told.join(". ")}.`);
    this.#note.textContent = `The roof: ${quantity(bandwidth, "B/s")} and ${quantity(peak, "FLOP/s")} (${plan.arithmetic}). Left of the ridge an operation waits for memory, right of it for arithmetic. The area of a mark is its share of the step; a ring is the whole step.`;
  }
}

/** Return a step's time, its place, and the operations that compute, near ones as one. */
function marksOf(step) {
  const ops = Object.entries(step.ops).sort(([, one], [, other]) => other.seconds - one.seconds);
  const sum = (key) => ops.reduce((total, [, op]) => total + op[key], 0);
  const seconds = sum("seconds") + step.moving_s + step.rest_s;
  const marks = [];
  for (const [name, { flops, bytes, seconds: own_s }] of ops) {
    const share = own_s / seconds;
    if (!flops || !bytes || share < LEAST_SHARE) continue;
    const intensity = flops / bytes;
    const reached = flops / own_s;
    const near = marks.find((one) => [one.intensity / intensity, one.rate / reached].every((ratio) => ratio < NEAR && ratio > 1 / NEAR));
    if (near) {
      near.names.push(name);
      near.share += share;
    } else marks.push({ names: [name], intensity, rate: reached, share });
  }
  return { seconds, marks, whole: { intensity: sum("flops") / sum("bytes"), rate: sum("flops") / seconds } };
}

function nameOf({ names }) {
  return names.length > 2 ? `${names[0]} and ${names.length - 1} more` : names.join(", ");
}

/** Labels of prefill end above their marks, those of decode begin below them; lines lead to those that moved. */
function drawn({ name, kind, seconds, marks, whole }, { x, y }, labels) {
  const circles = marks.map((mark) => {
    const title = svg("title", {}, `${name}: ${mark.names.join(", ")}, ${percent(mark.share)} of ${duration(seconds)}`);
    return svg("circle", { class: `share ${kind}`, cx: x(mark.intensity), cy: y(mark.rate), r: Math.sqrt(16 + 120 * mark.share) }, title);
  });
  const ring = svg("circle", { class: `whole ${kind}`, cx: x(whole.intensity), cy: y(whole.rate), r: 5 }, svg("title", {}, `${name}, the whole step: ${duration(seconds)}`));
  const isEnd = kind === "cool";
  const named = marks.filter(({ share }) => share >= LEAST_NAMED).sort((one, other) => other.intensity - one.intensity);
  const leaders = [];
  const texts = named.map((mark) => {
    const place = { x: x(mark.intensity) + (isEnd ? -8 : 8), y: y(mark.rate) + (isEnd ? -13 : 19) };
    const text = labels.text(`${nameOf(mark)} ${percent(mark.share)}`, { ...place, kind, isEnd, up: isEnd ? 1 : -1 });
    const base = Number(text.getAttribute("y"));
    if (base !== place.y) leaders.push(svg("line", { class: `leader ${kind}`, x1: x(mark.intensity), y1: y(mark.rate), x2: place.x, y2: base + (isEnd ? 3 : -10) }));
    return text;
  });
  return [...leaders, ...circles, ring, ...texts];
}
