// Percentiles of what callers waited for, by class of service, and how many objectives were met.

import { h } from "../shared/dom.js";
import { count, counted, duration, percent } from "../shared/format.js";

const MEASURES = [
  ["ttft", "TTFT", "Time to first token"],
  ["tpot", "TPOT", "Time per output token, over a whole answer"],
  ["itl", "ITL", "Inter-token latency: between one token and the next"],
  ["e2e", "E2E", "From the request to the end of its answer"],
  ["queue", "queue", "Time in the queue, a part of TTFT"],
];
const POINTS = ["p50", "p90", "p99"];

export class Latency {
  #body = h("tbody");
  #objectives = h("div.summary");

  constructor() {
    const heads = ["Class", "", "samples", ...POINTS, "mean"].map((name) => h("th", { scope: "col" }, name || h("span.unseen", {}, "Measure")));
    this.element = h(
      "section.card",
      { "aria-label": "Latency" },
      h("header", {}, h("h3", {}, "Latency by class of service")),
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
    this.#body.replaceChildren(...(rows.length ? rows : [h("tr", {}, h("td.none", { colspan: "7" }, "No answers in this time."))]));
    this.#objectives.replaceChildren(...this.#judge(window, objectives));
  }

  #judge(window, objectives) {
    if (objectives.length) return [h("h4", {}, "Objectives"), h("ul", {}, told(window, objectives))];
    return ["No objectives are set. With “--objective ttft=0.5”, for example, the server counts the answers that meet it."];
  }
}

function row(group, short, long, found) {
  const points = POINTS.map((point) => h("td", {}, duration(found[point])));
  return h("tr", {}, group, h("th", { scope: "row" }, h("abbr", { title: long }, short)), h("td", {}, count(found.count)), points, h("td", {}, duration(found.mean)));
}

/** Return one sentence a class: its limits, and how many answers kept all of them. */
function told(window, objectives) {
  const classes = [...new Set(objectives.map((one) => one.class))];
  return classes.map((name) => {
    const limits = objectives.filter((one) => one.class === name).map((one) => `${one.objective.toUpperCase()} within ${duration(one.limit_s)}`);
    const all = window.objectives?.[name]?.all;
    const kept = all ? `, kept by ${count(all.met)} of ${counted(all.met + all.missed, "answer")} (${percent(all.met / (all.met + all.missed))})` : "";
    return h("li", {}, `${name ?? "every class"}: ${limits.join(", ")}${kept}`);
  });
}
