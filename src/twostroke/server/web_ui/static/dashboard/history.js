// What the charts show: the last two minutes, from the server first, then a sample a second.

export const SPAN_S = 120;

export class History {
  samples = []; // {at_s, values}, the oldest first

  /** Add what a state says of now, and in place of all samples its past, if it has one. */
  add(state, valuesOf) {
    const at_s = performance.now() / 1000;
    if (state.past) this.samples = state.past.map((one) => ({ at_s: at_s - one.ago_s, values: valuesOf(one) }));
    this.samples.push({ at_s, values: valuesOf({ requests: state.requests, window: state.window["10"] }) });
    while (this.samples.length && this.samples[0].at_s < at_s - SPAN_S) this.samples.shift();
  }

  /** Return `[seconds ago, value]` of one name. */
  line(name) {
    const now_s = this.samples.at(-1)?.at_s ?? 0;
    return this.samples.map(({ at_s, values }) => [now_s - at_s, values[name]]);
  }
}
