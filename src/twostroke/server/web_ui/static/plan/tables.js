// The tables of a plan: by number of streams, and what other choices would give.

import { h } from "../shared/dom.js";
import { count, counted, duration, percent, rate } from "../shared/format.js";

const STREAMS = [["streams"], ["step", "A decode step, without prefill"], ["MBU", "Share of the bandwidth in that step"], ["MFU", "Share of the arithmetic in that step"], ["TTFT", "Among the other streams, without a queue"], ["TPOT", "With the prompts of the other streams"], ["tokens/s", "Of all streams, with prefill"], ["requests/s", "With prefill on the same devices"], ["$/1M", "Of output tokens, prefill included"], ["most time", "In that step"]];
const LOADS = [["load", "Request rate, as a share of the highest that the streams can serve"], ["requests/s"], ["at work", "Requests in progress"], ["TTFT", "Waiting included"], ["TPOT", "With the prompts of others"]];
const WHAT_IF = [["what if"], ["TTFT"], ["TPOT"], ["fit", "Requests that fit into memory"], ["$/1M", "Of output tokens, prefill included"]];

export function streamsTable(plan) {
  const rows = plan.rows.map((row) => {
    const cells = [duration(row.step_s), percent(row.mbu), percent(row.mfu), duration(row.ttft_s), duration(row.tpot_s), rate(row.tokens_per_s), rate(row.requests_per_s), usd(row.usd_per_million), row.bottleneck];
    return h(`tr${row.streams === plan.chosen?.streams ? ".chosen" : ""}`, {}, h("th", { scope: "row" }, count(row.streams)), cells.map((text) => h("td", {}, text)));
  });
  return table("By number of streams", STREAMS, rows);
}

/** Means if requests come by chance; nothing for a plan without an answer. */
export function loadsTable(plan) {
  const rows = plan.loads.map((one) => {
    const cells = [rate(one.requests_per_s), rate(one.at_work), duration(one.ttft_s), duration(one.tpot_s)];
    return h("tr", {}, h("th", { scope: "row" }, percent(one.share)), cells.map((text) => h("td", {}, text)));
  });
  return rows.length ? [table(`By load, with at most ${counted(plan.chosen.streams, "stream")}`, LOADS, rows)] : [];
}

export function whatIfTable(plan) {
  const rows = plan.what_ifs.map((one) => {
    const cells = [duration(one.ttft_s), duration(one.tpot_s), count(one.most_streams), usd(one.usd_per_million)];
    return h("tr", {}, h("th", { scope: "row" }, one.change), cells.map((text) => h("td", {}, text)));
  });
  return table(`What if, with ${counted(plan.shown, "stream")}`, WHAT_IF, rows);
}

function table(title, heads, rows) {
  const head = heads.map(([name, explanation]) => h("th", { scope: "col" }, explanation ? h("abbr", { title: explanation }, name) : name));
  const whole = h("table.data", {}, h("thead", {}, h("tr", {}, head)), h("tbody", {}, rows));
  return h("section.card", { "aria-label": title }, h("header", {}, h("h3", {}, title)), h("div.wide", { tabindex: "0", role: "group", "aria-label": title }, whole));
}

function usd(price) {
  return price === null ? "–" : price.toPrecision(3);
}
