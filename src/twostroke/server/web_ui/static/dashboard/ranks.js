// The ranks that share the model: where each runs, what it has, and how long it waits for others.

import { h } from "../shared/dom.js";
import { count, duration, quantity } from "../shared/format.js";

const HEADS = [
  ["Rank"],
  ["State"],
  ["Host"],
  ["Part", "Which of the stages, the parts of rows and the parts of columns it has"],
  ["Weights"],
  ["KV", "KV cache"],
  ["Collectives", "Time spent in communication with other ranks, waiting included"],
  ["Restarts"],
];
const PARTS = [["stage", "stage"], ["row_part", "rows"], ["column_part", "columns"]];

export class Ranks {
  #body = h("tbody");
  #note = h("p.summary");

  constructor() {
    const heads = HEADS.map(([name, long]) => h("th", { scope: "col" }, long ? h("abbr", { title: long }, name) : name));
    const table = h("table.data", {}, h("thead", {}, h("tr", {}, heads)), this.#body);
    this.element = h(
      "section.card",
      { "aria-label": "Ranks", hidden: true },
      h("header", {}, h("h3", {}, "Ranks")),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Ranks" }, table),
      this.#note,
    );
  }

  /** Show the ranks; a single process has none. */
  show(ranks, totals) {
    this.element.hidden = !ranks.length;
    if (!ranks.length) return;
    const link = ranks[0].link === "shared" ? "shared memory" : ranks[0].link;
    this.#note.textContent = `Connected by ${link}. Lost ranks replaced: ${count(totals.recoveries)}.`;
    const divided = PARTS.filter(([key]) => ranks.some((rank) => rank[key] !== ranks[0][key]));
    this.#body.replaceChildren(...ranks.map((rank) => row(rank, divided)));
  }
}

function row(rank, divided) {
  const part = divided.map(([key, name]) => `${name} ${rank[key]}`).join(", ");
  const cells = [rank.state, rank.host, part, quantity(rank.weight_bytes, "B"), quantity(rank.kv_bytes, "B"), duration(rank.collective_s), count(rank.restarts)];
  return h("tr", {}, h("th", { scope: "row" }, String(rank.rank)), cells.map((cell) => h("td", {}, cell)));
}
