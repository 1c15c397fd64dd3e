// The running requests, as a table; pointing at one shows its pages on the map.

import { h } from "../shared/dom.js";
import { count, duration, percent, rate } from "../shared/format.js";

const MOST = 50; // rows that are shown

const COLUMNS = [
  ["Request", (one) => one.id],
  ["tier", (one) => one.class],
  ["prompt tokens", (one) => count(one.prompt_tokens)],
  ["cached", (one) => percent(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : 0)],
  ["output tokens", (one) => count(one.output_tokens)],
  ["TTFT", (one) => duration(one.ttft_s)],
  ["tokens/s", (one) => rate(one.tokens_per_s)],
  ["drafts accepted", (one) => (one.drafted_tokens ? `${count(one.accepted_tokens)} of ${count(one.drafted_tokens)}` : "–")],
  ["KV pages", (one) => count(one.pages)],
  ["shared pages", (one) => count(one.shared_pages)],
  ["preemptions", (one) => count(one.preemptions)],
  ["age", (one) => duration(one.age_s)],
];

export class Requests {
  #body = h("tbody");
  #note = h("p.summary");

  /** `onPoint` is called with the place of the request that is pointed at, or null. */
  constructor(onPoint) {
    const head = h("tr", {}, COLUMNS.map(([name]) => h("th", { scope: "col" }, name)));
    this.element = h(
      "section.card.whole",
      { "aria-label": "Running requests" },
      h("header", {}, h("h3", {}, "Running requests")),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Running requests" }, h("table.data", {}, h("thead", {}, head), this.#body)),
      this.#note,
    );
    this.#body.addEventListener("pointerover", (event) => {
      const row = event.target.closest("tr[data-place]");
      onPoint(row ? Number(row.dataset.place) : null);
    });
    this.#body.addEventListener("pointerleave", () => onPoint(null));
  }

  show({ running, num_running: number, num_waiting: waiting, waiting_tokens: tokens, oldest_waiting_s: oldest }) {
    const rows = running.slice(0, MOST).map((one, place) =>
      h("tr", { "data-place": place }, COLUMNS.map(([, read], index) => h(index ? "td" : "th", index ? {} : { scope: "row" }, read(one)))));
    this.#body.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td.none", { colspan: COLUMNS.length }, "No running requests."))]));
    const more = number > rows.length ? `${count(number - rows.length)} more are running. ` : "";
    this.#note.textContent = more + (waiting ? `Queued: ${count(waiting)} with ${count(tokens)} tokens; the oldest has waited ${duration(oldest)}.` : "The queue is empty.");
  }
}
