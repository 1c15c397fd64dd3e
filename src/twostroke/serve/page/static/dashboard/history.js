// What the charts remember: one sample a second of the last two minutes, while somebody looks.

export const SPAN_S = 120;

export class History {
  samples = []; // {at_s, values}, the oldest first
  #uptime_s = 0;

  /** Add what a state says now; a server that began anew has no past. */
  add(state, values) {
    if (state.uptime_s < this.#uptime_s) this.samples = [];
    this.#uptime_s = state.uptime_s;
    const at_s = performance.now() / 1000;
    this.samples.push({ at_s, values });
    while (this.samples.length && this.samples[0].at_s < at_s - SPAN_S) this.samples.shift();
  }

  /** Return `[seconds ago, value]` of one name. */
  line(name) {
    const now_s = this.samples.at(-1)?.at_s ?? 0;
    return this.samples.map(({ at_s, values }) => [now_s - at_s, values[name]]);
  }
}
