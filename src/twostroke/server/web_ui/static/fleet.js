// A router's page: its replicas, their work in seconds, and how often prompts find their pages.

import { Poller } from "./dashboard/poll.js";
import { SPAN_S } from "./dashboard/history.js";
import { Tile } from "./dashboard/tiles.js";
import { Upstreams } from "./fleet/upstreams.js";
import { startKey, startTheme } from "./shared/bar.js";
import { h } from "./shared/dom.js";
import { count, duration, percent } from "./shared/format.js";

const COLUMNS = [
  ["Replica", "", (one) => one.url],
  ["State", "", (one) => h("span.state", {}, h("span.lamp", { "data-state": one.state === "ready" ? "ok" : "gone" }), one.state)],
  ["Models", "", (one) => one.models.join(", ")],
  ["Running", "Requests in progress", (one) => count(one.running)],
  ["Queue time", "Estimated queue time of a new request", (one) => duration(Math.max(one.work_s, 0))],
  ["Prefill time", "Prefill time of 1,000 bytes of a prompt", (one) => duration(one.pace_s_per_kb)],
  ["Cache hit rate", "Prompt tokens found in the prefix cache, of all prompt tokens", (one) => percent(one.prompt_tokens ? one.cached_tokens / one.prompt_tokens : null)],
  ["Eviction age", "Time since the last use of the KV cache page that was evicted last", (one) => duration(one.horizon_s)],
  ["Requests", "Sent to the replica since the router's start", (one) => count(one.requests)],
  ["Retried", "Lost before the first byte of the response, and sent to another replica", (one) => count(one.lost_before_first_byte)],
  ["Lost", "Lost after the first byte of the response", (one) => count(one.lost_after_first_byte)],
];

const tiles = {
  ready: new Tile("Ready replicas"),
  running: new Tile("Running requests", "Requests in progress"),
  work: new Tile("Queue time", "Estimated queue time of a new request, averaged over the replicas"),
  hits: new Tile("Cache hit rate", "Bytes of prompts whose replica should have them in its prefix cache, of all since the router's start"),
  lost: new Tile("Lost requests", "Requests that a replica lost after the first byte of the response"),
  wanted: new Tile("Desired replicas", "Replicas that the present load needs"),
};
const upstreams = new Upstreams();
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
    h("dl.tiles", {}, Object.values(tiles).map((tile) => tile.element), upstreams.tiles),
    upstreams.element,
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
  upstreams.show(state.overflow);
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
