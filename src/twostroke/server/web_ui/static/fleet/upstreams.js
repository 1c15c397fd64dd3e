// What a router's replicas and its upstreams have answered today, and what each side costs.

import { h } from "../shared/dom.js";
import { amountOf, count, counted, duration, money } from "../shared/format.js";
import { Tile } from "../dashboard/tiles.js";

const LAMPS = { ready: "ok" };
const COLUMNS = [
  ["Side", "The replicas of this router, or an API", (one) => one.name],
  ["State", "", (one) => one.state && h("span.state", {}, h("span.lamp", { "data-state": LAMPS[one.state] ?? "gone" }), one.state)],
  ["Rules", "When requests are sent there", (one) => one.when?.join(", ")],
  ["Running", "Requests in progress", (one) => one.name !== "here" && count(one.running)],
  ["Requests", "Answered today", (one) => count(one.requests)],
  ["Input", "Tokens of prompts", (one) => count(one.input_tokens)],
  ["Cached", "Tokens of prompts that came from a cache", (one) => count(one.cached_tokens)],
  ["Output", "Tokens of answers", (one) => count(one.output_tokens)],
  ["First token", "Average time to the first token of an upstream's streams", (one) => one.name !== "here" && duration(one.first_token_s)],
  ["Failed", "Requests that an upstream did not answer to the end, since the router's start", (one) => one.failed && count(total(one.failed))],
  ["Cost", "Today", (one) => money(one.cost, one.currency)],
  ["Limit", "The most that an upstream may cost in a day", (one) => one.max_cost_per_day && money(one.max_cost_per_day, one.currency)],
  ["Per 1M tokens", "Cost of a million tokens of prompts and answers, today", (one) => money(one.cost_per_million, one.currency)],
];

/** The card of a router with `--overflow`, which stays hidden without it. */
export class Upstreams {
  #rows = h("tbody");
  #day = h("p.about");
  #notes = h("ul");
  #tiles = {
    here: new Tile("Cost here", "What the replicas cost today (UTC)"),
    bought: new Tile("Cost of upstreams", "What requests cost today (UTC) that upstreams have answered"),
  };

  constructor() {
    const heads = COLUMNS.map(([name, long]) => h("th", { scope: "col" }, long ? h("abbr", { title: long }, name) : name));
    const table = h("table.data", {}, h("thead", {}, h("tr", {}, heads)), this.#rows);
    this.element = h("section.card", { "aria-label": "Here and upstreams", hidden: true },
      h("header", {}, h("h3", {}, "Here and upstreams"), this.#day),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Here and upstreams" }, table),
      h("div.summary", {}, this.#notes));
    this.tiles = Object.values(this.#tiles).map((tile) => tile.element);
    for (const tile of this.tiles) tile.hidden = true;
  }

  /** Show the field `overflow` of a router's state. */
  show(overflow) {
    for (const part of [this.element, ...this.tiles]) part.hidden = !overflow;
    if (!overflow) return;
    const { here, upstreams, currency, day } = overflow;
    const sides = [{ ...here, name: "here" }, ...upstreams].map((one) => ({ ...one, currency }));
    const bought = upstreams.reduce((sum, one) => sum + one.cost, 0);
    const requests = upstreams.reduce((sum, one) => sum + one.requests, 0);
    this.#day.textContent = `${day} (UTC)`;
    this.#tiles.here.show(amountOf(here.cost), `${currency}, ${counted(here.requests, "request")}`);
    this.#tiles.bought.show(amountOf(bought), `${currency}, ${counted(requests, "request")}`);
    this.#rows.replaceChildren(...sides.map((one) =>
      h("tr", {}, COLUMNS.map(([, , read], index) => h(index ? "td" : "th", index ? {} : { scope: "row" }, read(one) || "")))));
    this.#notes.replaceChildren(...notes(overflow).map((text) => h("li", {}, text)));
  }
}

function notes({ here, upstreams, currency, objective_s: objective }) {
  const list = upstreams.filter((one) => one.reason).map((one) => `${one.name}: ${one.reason}`);
  for (const one of upstreams.filter((each) => each.estimated_requests)) {
    const part = `${money(one.estimated_cost, currency)} of ${counted(one.estimated_requests, "request")}`;
    list.push(`${one.name}: ${part} is estimated, since the upstream has not reported what it used.`);
  }
  if (here.cost_elsewhere !== null && here.output_tokens) {
    list.push(`At the prices of the upstreams, the tokens computed here would have cost ${money(here.cost_elsewhere, currency)}.`);
  }
  if (here.cost === null) list.push("The overflow file has no price of the replicas, so the cost here is not known.");
  if (objective !== null) list.push(`Objective: the first token in ${duration(objective)}.`);
  return list;
}

function total(counts) {
  return Object.values(counts).reduce((sum, one) => sum + one, 0);
}
