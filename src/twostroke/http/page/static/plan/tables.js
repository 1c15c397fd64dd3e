// The tables of a plan: by number of streams, and what other choices would give.

import { h } from "../shared/dom.js";
import { count, counted, duration, percent, rate } from "../shared/format.js";

const STREAMS = [["streams"], ["TPOT"], ["tokens/s"], ["each", "Tokens a second of one stream"], ["MBU", "Share of the bandwidth"], ["MFU", "Share of the arithmetic"], ["requests/s", "Whole requests, their prefill on the same devices"], ["$/1M", "Of output tokens, prefill included"], ["most time"]];
const WHAT_IF = [["what if"], ["TTFT"], ["TPOT"], ["fit", "Requests that fit into memory"], ["$/1M", "Of output tokens, prefill included"]];

export function streamsTable(plan) {
  const rows = plan.rows.map((row) => {
    const cells = [duration(row.tpot_s), rate(row.tokens_per_s), rate(1 / row.tpot_s), percent(row.mbu), percent(row.mfu), rate(row.requests_per_s), usd(row.usd_per_million), row.bottleneck];
    return h(`tr${row.streams === plan.chosen?.streams ? ".chosen" : ""}`, {}, h("th", { scope: "row" }, count(row.streams)), cells.map((text) => h("td", {}, text)));
  });
  return table("By number of streams", STREAMS, rows);
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
