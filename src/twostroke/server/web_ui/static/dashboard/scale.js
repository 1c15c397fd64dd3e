// Ends of axes that read well, and the paths of lines.

/** Return the next of 1, 1.5, 2, 3, 4, 5, 6, 8, 10, 15 … that is at least `value`. */
export function roundUp(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value * 0.999) * power;
}

const GAP_S = 4; // a longer silence breaks a line

/**
 * Return an SVG path through `[seconds ago, value]`, the latest at the right end.
 *
 * `size` is {width, height, span_s, top}: `top` is the value at the upper end.
 */
export function toPath(points, { width, height, span_s, top }) {
  let path = "";
  let before_s = Infinity;
  for (const [ago_s, value] of points) {
    if (value === null || value === undefined) {
      before_s = Infinity;
      continue;
    }
    const x = width * (1 - ago_s / span_s);
    const y = height * (1 - Math.min(value / top, 1));
    path += `${before_s - ago_s > GAP_S ? "M" : "L"}${x.toFixed(1)} ${y.toFixed(1)}`;
    before_s = ago_s;
  }
  return path;
}
