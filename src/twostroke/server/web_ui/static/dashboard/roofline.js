// This machine's roofline: what bandwidth and arithmetic allow, and where the two strokes run now.

import { h, svg } from "../shared/dom.js";
import { isKnown, percent, quantity, rate } from "../shared/format.js";
import { decade, grid, logAxes } from "../shared/logaxes.js";

const SIZE = { width: 520, height: 300, left: 64, right: 16, top: 14, bottom: 36 };
const STROKES = [
  ["prefill", "cool"],
  ["decode", "warm"],
];
const TRAIL = 60;

export class Roofline {
  #plot = svg("svg", { class: "roofline", viewBox: `0 0 ${SIZE.width} ${SIZE.height}`, role: "img", "aria-label": "Roofline" });
  #rows = h("tbody");
  #note = h("p.summary");
  #trail = { prefill: [], decode: [] };

  constructor() {
    const heads = ["Phase", "busy", "FLOP/B", "compute", "bandwidth", "MFU", "MBU", "of roofline"];
    const titles = { MFU: "Model FLOP utilization: share of this machine's peak compute", MBU: "Memory bandwidth utilization: share of this machine's memory bandwidth", busy: "Share of the time that the engine spends in this phase" };
    const head = h("tr", {}, heads.map((name) => h("th", { scope: "col" }, titles[name] ? h("abbr", { title: titles[name] }, name) : name)));
    const keys = h("ul.keys", {}, STROKES.map(([name, kind]) => h("li", {}, h(`span.key.${kind}`, { "aria-hidden": "true" }), name)));
    this.element = h(
      "section.card",
      { "aria-label": "Roofline" },
      h("header", {}, h("h3", {}, "Roofline of this machine"), keys),
      this.#plot,
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Prefill and decode" }, h("table.data", {}, h("thead", {}, head), this.#rows)),
      this.#note,
    );
  }

  show(hardware, strokes) {
    this.#showRows(hardware, strokes);
    if (!hardware) {
      this.#note.textContent = "The peak compute and bandwidth of this machine are not known, so no roofline can be drawn.";
      this.#plot.setAttribute("hidden", "");
      return;
    }
    this.#plot.removeAttribute("hidden");
    this.#note.textContent = `${hardware.name}: ${quantity(hardware.bandwidth, "B/s")} and ${quantity(hardware.peak, "op/s")} (${hardware.peak_kind}), measured here.`;
    for (const [name] of STROKES) this.#remember(name, strokes[name]);
    this.#draw(hardware, strokes);
  }

  #remember(name, { intensity, flops_per_s: flops }) {
    const trail = this.#trail[name];
    if (isKnown(intensity) && isKnown(flops)) trail.push([intensity, flops]);
    if (trail.length > TRAIL) trail.shift();
  }

  #showRows(hardware, strokes) {
    const rows = STROKES.map(([name]) => {
      const stroke = strokes[name];
      const cells = [percent(stroke.busy), rate(stroke.intensity), quantity(stroke.flops_per_s, "FLOP/s"), quantity(stroke.bytes_per_s, "B/s"), percent(stroke.mfu), percent(stroke.mbu), percent(ofRoof(hardware, stroke))];
      return h("tr", {}, h("th", { scope: "row" }, name), cells.map((text) => h("td", {}, text)));
    });
    this.#rows.replaceChildren(...rows);
  }

  #draw(hardware, strokes) {
    const axes = axesFor(hardware, this.#trail);
    const ridge = hardware.peak / hardware.bandwidth;
    const { x, y } = axes;
    const roof = `M${x(axes.from)} ${y(axes.from * hardware.bandwidth)}L${x(ridge)} ${y(hardware.peak)}L${x(axes.to)} ${y(hardware.peak)}`;
    const slope = (Math.atan2(y(ridge * hardware.bandwidth) - y(axes.from * hardware.bandwidth), x(ridge) - x(axes.from)) * 180) / Math.PI;
    const middle = Math.sqrt(Math.max(axes.from, axes.low / hardware.bandwidth) * ridge);
    const label = (text, at, given = {}) => svg("text", { x: at[0], y: at[1], ...given }, text);
    const along = [x(middle), y(middle * hardware.bandwidth) - 7];
    const parts = [
      ...grid(axes, { x: "FLOP per byte", y: "FLOP/s" }),
      svg("path", { class: "roof", d: roof, fill: "none" }),
      label(`bandwidth ${quantity(hardware.bandwidth, "B/s")}`, along, { class: "roof-label", "text-anchor": "middle", transform: `rotate(${slope} ${along[0]} ${along[1]})` }),
      label(`peak ${quantity(hardware.peak, "op/s")}`, [SIZE.width - SIZE.right, y(hardware.peak) - 7], { class: "roof-label", "text-anchor": "end" }),
    ];
    for (const [name, kind] of STROKES) {
      for (const [intensity, flops] of this.#trail[name]) parts.push(svg("circle", { class: `past ${kind}`, cx: x(intensity), cy: y(flops), r: 2 }));
      const { intensity, flops_per_s: flops } = strokes[name];
      if (!isKnown(intensity) || !isKnown(flops)) continue;
      parts.push(svg("circle", { class: `point ${kind}`, cx: x(intensity), cy: y(flops), r: 5.5 }));
      const isAbove = name === "prefill"; // above right and below left, as they may run close together
      const at = isAbove ? [x(intensity) + 8, y(flops) - 7] : [x(intensity) - 8, y(flops) + 15];
      parts.push(label(name, at, { class: "point-label", "text-anchor": isAbove ? "start" : "end" }));
    }
    this.#plot.replaceChildren(...parts);
    this.#plot.setAttribute("aria-label", told(hardware, strokes));
  }
}

function ofRoof(hardware, { intensity, flops_per_s: flops }) {
  if (!hardware || !isKnown(intensity) || !isKnown(flops)) return null;
  return flops / Math.min(hardware.peak, intensity * hardware.bandwidth);
}

function told(hardware, strokes) {
  const said = STROKES.map(([name]) => {
    const { intensity, flops_per_s: flops } = strokes[name];
    if (!isKnown(flops)) return `${name}: no steps`;
    return `${name}: ${rate(intensity)} FLOP per byte, ${quantity(flops, "FLOP/s")}, ${percent(ofRoof(hardware, strokes[name]))} of the roofline`;
  });
  return `Roofline on logarithmic axes. ${said.join(". ")}.`;
}

/** Decades that hold the ridge and all points. */
function axesFor(hardware, trail) {
  const points = Object.values(trail).flat();
  const ridge = hardware.peak / hardware.bandwidth;
  return logAxes(SIZE, {
    from: decade(Math.min(0.5, ...points.map(([intensity]) => intensity)), Math.floor),
    to: decade(Math.max(ridge * 8, ...points.map(([intensity]) => intensity * 1.5)), Math.ceil),
    low: decade(Math.min(hardware.peak / 300, ...points.map(([, flops]) => flops / 1.5)), Math.floor),
    high: decade(hardware.peak * 1.5, Math.ceil),
  });
}
