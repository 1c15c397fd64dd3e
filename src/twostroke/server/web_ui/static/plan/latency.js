// Latency against throughput by number of streams, with the objectives.

import { h, svg } from "../shared/dom.js";
import { count, counted, duration, rate } from "../shared/format.js";
import { grid, logAxes } from "../shared/logaxes.js";
import { Labels } from "./labels.js";

const SIZE = { height: 320, left: 52, right: 16, top: 14, bottom: 36 };
const APART = 26; // pixels between two numbers of streams that are shown
const HIDDEN = 7; // a point as near as that to the chosen one is left out

export class LatencyPlot {
  #plot = svg("svg", { class: "roofline plan-plot", role: "img", "aria-label": "Latency" });
  #note = h("p.summary", {}, "Each point is a number of streams. TTFT is without a queue; dashed lines are objectives.");

  constructor() {
    const keys = [["TTFT", "cool"], ["TPOT", "warm"]].map(([name, kind]) => h("li", {}, h(`span.key.${kind}`, { "aria-hidden": "true" }), name));
    this.element = h("section.card", { "aria-label": "Latency and throughput" }, h("header", {}, h("h3", {}, "Latency and throughput by streams"), h("ul.keys", {}, keys)), this.#plot, this.#note);
  }

  show({ rows, chosen, question }) {
    const size = { ...SIZE, width: this.#plot.clientWidth || 520 };
    const limits = [["TTFT", question.ttft_s, "cool"], ["TPOT", question.tpot_s, "warm"]].filter(([, limit]) => limit !== null);
    const times = [...rows.flatMap((row) => [row.ttft_s, row.tpot_s]), ...limits.map(([, limit]) => limit)].map((seconds) => seconds * 1000);
    const rates = rows.map((row) => row.tokens_per_s);
    const axes = logAxes(size, { from: Math.min(...rates) / 1.3, to: Math.max(...rates) * 1.3, low: Math.min(...times) / 1.5, high: Math.max(...times) * 1.6 });
    const { x, y } = axes;
    const labels = new Labels(size.width);
    const across = ([name, limit, kind]) => [
      svg("line", { class: `across ${kind}`, x1: size.left, x2: size.width - size.right, y1: y(limit * 1000), y2: y(limit * 1000) }),
      labels.text(`objective of ${name}: ${duration(limit)}`, { x: size.left + 4, y: y(limit * 1000) - 5, kind, up: 1 }),
    ];
    const line = (key) => rows.map((row, place) => `${place ? "L" : "M"}${x(row.tokens_per_s).toFixed(1)} ${y(row[key] * 1000).toFixed(1)}`).join("");
    this.#plot.setAttribute("viewBox", `0 0 ${size.width} ${size.height}`);
    this.#plot.replaceChildren(
      ...grid(axes, { x: "tokens/s of all streams", y: "ms" }),
      ...limits.flatMap(across),
      svg("path", { class: "ttft-line", d: line("ttft_s"), fill: "none" }),
      svg("path", { class: "tpot-line", d: line("tpot_s"), fill: "none" }),
      ...points(rows, chosen, axes, labels),
    );
    const told = rows.map((row) => `${counted(row.streams, "stream")} ${duration(row.ttft_s)}, ${duration(row.tpot_s)} and ${rate(row.tokens_per_s)} tokens a second`);
    this.#plot.setAttribute("aria-label", `Latency against throughput. TTFT, TPOT: ${told.join("; ")}.`);
  }
}

/** Points with numbers where there is room: the chosen one has its own in any case. */
function points(rows, chosen, { x, y }, labels) {
  const isChosen = (row) => row.streams === chosen?.streams;
  const kept = [];
  return [...rows].reverse().sort((one, other) => isChosen(other) - isChosen(one)).flatMap((row) => {
    const at = [x(row.tokens_per_s), y(row.tpot_s * 1000)];
    const title = svg("title", {}, `${counted(row.streams, "stream")}: TPOT ${duration(row.tpot_s)}, ${rate(row.tokens_per_s)} tokens/s`);
    const point = svg("circle", { class: "point warm", cx: at[0], cy: at[1], r: isChosen(row) ? 7 : 4 }, title);
    const gap = Math.min(...kept.map((one) => Math.hypot(one[0] - at[0], one[1] - at[1])));
    if (gap < APART) return gap < HIDDEN ? [] : [point];
    kept.push(at);
    return [point, labels.text(count(row.streams), { x: at[0] - 8, y: at[1] - 7, kind: isChosen(row) ? "chosen" : "warm", isEnd: true, up: 1 })];
  });
}
