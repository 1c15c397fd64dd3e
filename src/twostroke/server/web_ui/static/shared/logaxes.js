// Logarithmic axes for plots: where values are, the grid, and ticks with their units.

import { svg } from "./dom.js";
import { quantity } from "./format.js";

/**
 * Return axes on which `size` is {width, height, left, right, top, bottom}, in pixels.
 *
 * `from` and `to` are the ends to the right, `low` and `high` those upwards; `x` and `y` give the
 * place of a value.
 */
export function logAxes(size, { from, to, low, high }) {
  const share = (value, least, most) => Math.min(1, Math.max(0, Math.log10(value / least) / Math.log10(most / least)));
  return {
    size, from, to, low, high,
    x: (value) => size.left + share(value, from, to) * (size.width - size.left - size.right),
    y: (value) => size.height - size.bottom - share(value, low, high) * (size.height - size.top - size.bottom),
  };
}

/** Return the power of ten at or beyond a value; `round` says in which direction. */
export function decade(value, round) {
  return 10 ** round(Math.log10(value));
}

/** Return the grid with its ticks; `names` are {x, y}: what the axes show. */
export function grid(axes, names) {
  const { size, x, y } = axes;
  const [bottom, right] = [size.height - size.bottom, size.width - size.right];
  const parts = [];
  for (const value of ticks(axes.from, axes.to)) {
    parts.push(svg("line", { class: "grid-line", x1: x(value), x2: x(value), y1: size.top, y2: bottom }));
    parts.push(svg("text", { class: "tick", x: x(value), y: bottom + 14, "text-anchor": "middle" }, quantity(value, "")));
  }
  for (const value of ticks(axes.low, axes.high)) {
    parts.push(svg("line", { class: "grid-line", x1: size.left, x2: right, y1: y(value), y2: y(value) }));
    parts.push(svg("text", { class: "tick", x: size.left - 6, y: y(value) + 4, "text-anchor": "end" }, quantity(value, "")));
  }
  parts.push(svg("text", { class: "tick", x: right, y: size.height - 6, "text-anchor": "end" }, names.x));
  parts.push(svg("text", { class: "tick", x: size.left, y: size.height - 6, "text-anchor": "start" }, `↑ ${names.y}`));
  return parts;
}

/** Powers of ten from one value to another; on a short axis also their doubles and fivefolds. */
function ticks(from, to) {
  const steps = to / from > 1000 ? [1] : [1, 2, 5];
  const found = [];
  for (let power = decade(from, Math.floor); power <= to; power *= 10) {
    found.push(...steps.map((step) => step * power));
  }
  return found.filter((value) => value >= from * 0.999 && value <= to * 1.001);
}
