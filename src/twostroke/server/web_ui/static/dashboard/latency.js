// Latency percentiles by service tier, and the number of requests that met their objectives.

import { h } from "../shared/dom.js";
import { count, counted, duration, percent } from "../shared/format.js";

const MEASURES = [
  ["ttft", "TTFT", "Time to first token"],
  ["tpot", "TPOT", "Time per output token, averaged over a response"],
  ["itl", "ITL", "Inter-token latency: between one token and the next"],
  ["e2e", "E2E", "End-to-end latency: from the request to the end of its response"],
  ["queue", "queue", "Queue time, which is part of TTFT"],
];
const POINTS = ["p50", "p90", "p99"];

export class Latency {
  #body = h("tbody");
  #objectives = h("div.summary");

  constructor() {
    const heads = ["Service tier", "", "samples", ...POINTS, "mean"].map((name) => h("th", { scope: "col" }, name || h("span.unseen", {}, "Measure")));
    this.element = h(
      "section.card",
      { "aria-label": "Latency" },
      h("header", {}, h("h3", {}, "Latency by service tier")),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Latency" }, h("table.data", {}, h("thead", {}, h("tr", {}, heads)), this.#body)),
      this.#objectives,
    );
  }

  show(window, objectives) {
    const classes = Object.entries(window.latency);
    const rows = classes.flatMap(([name, measures]) => {
      const there = MEASURES.filter(([key]) => measures[key]);
      const group = h("th", { scope: "rowgroup", rowspan: there.length }, name);
      return there.map(([key, short, long], index) => row(index ? null : group, short, long, measures[key]));
    });
    this.#body.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td.none", { colspan: "7" }, "No requests finished in this time range."))]));
    this.#objectives.replaceChildren(...this.#judge(window, objectives));
  }

  #judge(window, objectives) {
    if (objectives.length) return [h("h4", {}, "Objectives"), h("ul", {}, told(window, objectives))];
    return ["No latency objectives are set. Start the server with “--objective ttft=0.5”, for example, to count the requests that meet it."];
  }
}

function row(group, short, long, found) {
  const points = POINTS.map((point) => h("td", {}, duration(found[point])));
  return h("tr", {}, group, h("th", { scope: "row" }, h("abbr", { title: long }, short)), h("td", {}, count(found.count)), points, h("td", {}, duration(found.mean)));
}

/** Return a sentence for each service tier: its limits, and how many requests met all of them. */
function told(window, objectives) {
  const classes = [...new Set(objectives.map((one) => one.class))];
  return classes.map((name) => {
    const limits = objectives.filter((one) => one.class === name).map((one) => `${one.objective.toUpperCase()} within ${duration(one.limit_s)}`);
    const all = window.objectives?.[name]?.all;
    const kept = all ? `, met by ${count(all.met)} of ${counted(all.met + all.missed, "request")} (${percent(all.met / (all.met + all.missed))})` : "";
    return h("li", {}, `${name ?? "all tiers"}: ${limits.join(", ")}${kept}`);
  });
}
