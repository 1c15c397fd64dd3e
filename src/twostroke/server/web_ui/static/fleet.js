// A router's page: its replicas, their work in seconds, and how often prompts find their pages.

import { Poller } from "./dashboard/poll.js";
import { SPAN_S } from "./dashboard/history.js";
import { Tile } from "./dashboard/tiles.js";
import { startKey, startTheme } from "./shared/bar.js";
import { h } from "./shared/dom.js";
import { count, duration, percent } from "./shared/format.js";

const COLUMNS = [
  ["Replica", "", (one) => one.url],
  ["State", "", (one) => h("span.state", {}, h("span.lamp", { "data-state": one.state === "ready" ? "ok" : "gone" }), one.state)],
  ["Models", "", (one) => one.models.join(", ")],
  ["Running", "Requests that have not ended", (one) => count(one.running)],
  ["Work", "How long a new request would wait there", (one) => duration(Math.max(one.work_s, 0))],
  ["Pace", "Time for 1,000 bytes of a prompt", (one) => duration(one.pace_s_per_kb)],
  ["Cached", "Share of prompt tokens that its cache held", (one) => percent(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : null)],
  ["Horizon", "How long ago the page was used that its cache evicted last", (one) => duration(one.horizon_s)],
  ["Requests", "Sent there since the router's start", (one) => count(one.requests)],
  ["Lost before", "Lost there before their first byte, and sent to another", (one) => count(one.lost_before_first_byte)],
  ["Lost after", "Lost there after their first byte", (one) => count(one.lost_after_first_byte)],
];

const tiles = {
  ready: new Tile("Ready"),
  running: new Tile("Running", "Requests that have not ended"),
  work: new Tile("Work", "How long a new request would wait, on average over the replicas"),
  hits: new Tile("Cache hits", "Share of the prompts' bytes that their replica should hold, since the router's start"),
  lost: new Tile("Lost", "Requests that a replica lost after their first byte"),
  wanted: new Tile("Wanted", "Replicas that the present work asks for"),
};
const samples = []; // {at_s, values}, the oldest first
const about = h("p.about");
const trouble = h("p.trouble", { role: "status", hidden: true });
const rows = h("tbody");
const reasons = h("ul");
const view = document.getElementById("view-dashboard");

draw();
startTheme();
startKey();
new Poller(show, complain).setWanted(true);

function draw() {
  const heads = COLUMNS.map(([name, long]) => h("th", { scope: "col" }, long ? h("abbr", { title: long }, name) : name));
  const table = h("table.data", {}, h("thead", {}, h("tr", {}, heads)), rows);
  view.append(h("div.dashboard", {},
    h("header.dashboard-head", {}, h("h2", {}, "Fleet"), about),
    trouble,
    h("dl.tiles", {}, Object.values(tiles).map((tile) => tile.element)),
    h("section.card", { "aria-label": "Replicas" },
      h("header", {}, h("h3", {}, "Replicas")),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Replicas" }, table),
      h("div.summary", {}, reasons))));
}

function show(state) {
  const { replicas } = state;
  const ready = replicas.filter((one) => one.state === "ready");
  const sum = (name, among = replicas) => among.reduce((total, one) => total + Math.max(one[name], 0), 0);
  const values = { ready: ready.length, running: sum("running"), work: ready.length ? sum("work_s", ready) / ready.length : null, hits: state.hit_rate };
  remember(values);
  trouble.textContent = state.warning;
  trouble.hidden = !state.warning;
  view.classList.remove("stale");
  const all = `${count(ready.length)} of ${count(replicas.length)} replicas ${replicas.length === 1 ? "is" : "are"} ready`;
  document.getElementById("served").textContent = all;
  document.getElementById("lamp").dataset.state = ready.length ? "ok" : "stopped";
  about.textContent = `policy ${state.policy} · ${count(state.known_blocks)} blocks of prompts known · ${count(sum("requests"))} requests sent`;
  tiles.ready.show(count(values.ready), `of ${count(replicas.length)} replicas`, line("ready"));
  tiles.running.show(count(values.running), "requests", line("running"));
  tiles.work.show(duration(values.work), "for a new request", line("work"));
  tiles.hits.show(percent(state.hit_rate), `at best ${percent(state.best_hit_rate)}`, line("hits"));
  const again = sum("lost_before_first_byte");
  tiles.lost.show(count(sum("lost_after_first_byte")), `${count(again)} more ${again === 1 ? "was" : "were"} sent again`);
  tiles.wanted.show(count(state.wanted_replicas), "replicas");
  rows.replaceChildren(...replicas.map((one) =>
    h("tr", {}, COLUMNS.map(([, , read], index) => h(index ? "td" : "th", index ? {} : { scope: "row" }, read(one))))));
  reasons.replaceChildren(...replicas.filter((one) => one.reason).map((one) =>
    h("li", {}, `${one.url} has been ${one.state} for ${duration(one.since_s)}: ${one.reason}`)));
}

function remember(values) {
  const at_s = performance.now() / 1000;
  samples.push({ at_s, values });
  while (samples[0].at_s < at_s - SPAN_S) samples.shift();
}

function line(name) {
  const now_s = samples.at(-1).at_s;
  return samples.map(({ at_s, values }) => [now_s - at_s, values[name]]);
}

function complain(error) {
  const isOff = error.status === 404;
  trouble.textContent = isOff ? error.message : `${error.message} What is shown is the last that was known.`;
  trouble.hidden = false;
  view.classList.add("stale");
  if (isOff) return;
  document.getElementById("served").textContent = "Router not reachable, trying again …";
  document.getElementById("lamp").dataset.state = "gone";
}
