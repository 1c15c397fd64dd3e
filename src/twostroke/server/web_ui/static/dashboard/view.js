// The dashboard: what the server does now, and did in the last minute.

import { h } from "../shared/dom.js";
import { count, counted, duration, isKnown, percent, quantity, rate } from "../shared/format.js";
import { Chart } from "./chart.js";
import { Drafts } from "./drafts.js";
import { History } from "./history.js";
import { Latency } from "./latency.js";
import { Models } from "./models.js";
import { PageMap } from "./pages.js";
import { Poller } from "./poll.js";
import { Prompts } from "./prompts.js";
import { Ranks } from "./ranks.js";
import { Requests } from "./requests.js";
import { Roofline } from "./roofline.js";
import { Steps } from "./steps.js";
import { Tile } from "./tiles.js";

export class Dashboard {
  #place;
  #history = new History();
  #poller = new Poller((state) => this.#show(state), (error) => this.#complain(error));
  #window = "10";
  #state = null;
  #trouble = h("p.trouble", { role: "status", hidden: true });
  #about = h("p.about");
  #tiles = {
    running: new Tile("Running requests"),
    out: new Tile("Output tokens"),
    in: new Tile("Prompt tokens"),
    ttft: new Tile("TTFT p50", "Median time to first token"),
    itl: new Tile("ITL p50", "Median inter-token latency"),
    cache: new Tile("Prefix cache hit rate", "Prompt tokens found in the prefix cache, of all prompt tokens"),
    goodput: new Tile("Goodput", "Requests per second that met all latency objectives"),
  };
  #batch = new Chart("Requests", [{ name: "running", kind: "warm" }, { name: "queued", kind: "cool" }], this.#history, count);
  #flow = new Chart("Tokens per second", [{ name: "output", kind: "warm" }, { name: "prompt", kind: "cool" }], this.#history, rate);
  #steps = new Steps();
  #map = new PageMap();
  #roofline = new Roofline();
  #latency = new Latency();
  #drafts = new Drafts();
  #models = new Models((name) => this.#poller.choose(name));
  #prompts = new Prompts();
  #ranks = new Ranks();
  #requests = new Requests((place) => this.#map.single(place));

  constructor(place) {
    this.#place = place;
    const head = h("header.dashboard-head", {}, h("h2", {}, "Dashboard"), this.#about, this.#windows());
    const tiles = h("dl.tiles", {}, Object.values(this.#tiles).map((tile) => tile.element));
    const charts = h("div.cards.three", {}, this.#batch.element, this.#flow.element, this.#steps.element);
    const maps = h("div.cards.two", {}, this.#map.element, this.#roofline.element);
    const tables = h("div.cards.two", {}, this.#latency.element, this.#drafts.element);
    place.append(h("div.dashboard", {}, head, this.#trouble, this.#models.element, tiles, charts, maps, this.#requests.element, this.#ranks.element, tables, this.#prompts.element));
    new ResizeObserver(() => this.#draw()).observe(place);
    window.addEventListener("themechange", () => this.#draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.#draw());
  }

  setVisible(isVisible) {
    this.#poller.setWanted(isVisible);
    this.#draw();
  }

  #show(state) {
    this.#state = state;
    this.#trouble.hidden = true;
    this.#place.classList.remove("stale");
    this.#history.add(state, valuesOf);
    this.#draw();
  }

  #draw() {
    const state = this.#state;
    if (!state || this.#place.hidden) return;
    const window = state.window[this.#window];
    this.#showAbout(state);
    this.#models.show(state.models, state.model.name);
    this.#showTiles(state, window);
    this.#batch.update();
    this.#flow.update();
    this.#steps.show(state.steps);
    this.#map.show(state.pages, state.requests.running);
    this.#roofline.show(state.hardware, window.strokes);
    this.#latency.show(window, state.objectives ?? []);
    this.#drafts.show(window.speculation, state.engine);
    this.#requests.show(state.requests);
    this.#prompts.show(state.prompt_doctor);
    this.#ranks.show(state.ranks ?? [], state.totals);
  }

  #showAbout({ model, hardware, engine, memory, uptime_s: uptime, version }) {
    const parts = [
      `${model.name}: ${model.architecture}, ${quantity(model.parameters, "")} parameters, ${model.format}`,
      `${engine.backend}${hardware ? ` on ${hardware.name}` : ""}`,
      `${quantity(memory.used_bytes, "B")} of memory used, ${quantity(memory.kv_bytes, "B")} reserved for the KV cache`,
      `up ${duration(uptime)}`,
      `Twostroke ${version}`,
    ];
    this.#about.textContent = parts.join(" · ");
  }

  #showTiles({ requests, engine, tiers, handover }, window) {
    const tiles = this.#tiles;
    const past = (name) => this.#history.line(name);
    const { ttft, itl } = overall(window.latency);
    tiles.running.show(count(requests.num_running), requests.num_waiting ? `${count(requests.num_waiting)} queued` : `at most ${count(engine.max_running)}; none queued`, past("running"));
    tiles.out.show(`${rate(window.completion_tokens_per_s)}/s`, `${rate(window.answers_per_s)} requests/s`, past("output"));
    tiles.in.show(`${rate(window.prompt_tokens_per_s)}/s`, `${rate(window.cached_tokens_per_s)}/s cached${elsewhere(handover)}`, past("prompt"));
    tiles.ttft.show(duration(ttft?.p50), tail(ttft), past("ttft"));
    tiles.itl.show(duration(itl?.p50), tail(itl), past("itl"));
    tiles.cache.show(percent(window.cache_hit_rate), ofPrompts(tiers), past("cache"));
    if (window.goodput) {
      tiles.goodput.show(`${rate(window.goodput.requests_per_s)}/s`, `${percent(window.goodput.share)} met all objectives`, past("goodput"));
    } else {
      tiles.goodput.show("–", "no objectives set", []);
    }
  }

  #windows() {
    const choose = (name) => {
      this.#window = name;
      this.#draw();
    };
    const boxes = ["10", "60"].map((name) => {
      const box = h("input", { type: "radio", name: "window", value: name, id: `window-${name}`, checked: name === this.#window, onchange: () => choose(name) });
      return [box, h("label", { for: box.id }, `${name} s`)];
    });
    return h("fieldset.windows", {}, h("legend", {}, "Time range"), h("div", {}, boxes.flat()));
  }

  #complain(error) {
    this.#trouble.textContent = error.status === 404 ? error.message : `${error.message} The values shown are the last known ones.`;
    this.#trouble.hidden = false;
    this.#place.classList.add("stale");
  }
}

/** Return the values of the charts at one moment. */
function valuesOf({ requests, window }) {
  const latency = overall(window.latency);
  return {
    running: requests.num_running,
    queued: requests.num_waiting,
    output: window.completion_tokens_per_s,
    prompt: window.prompt_tokens_per_s,
    ttft: latency.ttft?.p50,
    itl: latency.itl?.p50,
    cache: window.cache_hit_rate,
    goodput: window.goodput?.requests_per_s ?? window.answers_per_s,
  };
}

/** Return the latency of the service tier with the most samples, for the tiles. */
function overall(latency) {
  const classes = Object.values(latency);
  return Object.fromEntries(["ttft", "itl"].map((key) => [key, classes.map((one) => one[key]).filter(Boolean).sort((a, b) => b.count - a.count)[0]]));
}

/** Say what the prefix cache's share is of, and what pages that stay have saved. */
function ofPrompts(tiers) {
  const known = tiers.filter((tier) => tier.bytes_stored !== null); // not of a store
  const stored = known.length ? `${quantity(known.reduce((sum, tier) => sum + tier.bytes_stored, 0), "B")} stored, ` : "";
  const savedS = tiers.reduce((sum, tier) => sum + tier.saved_s, 0);
  return tiers.length ? `of prompt tokens; ${stored}${duration(savedS)} saved` : "of prompt tokens";
}

/** Say what prefill engines have read for this engine, or this one for others. */
function elsewhere(handover) {
  if (handover?.lender) return `; ${counted(handover.lender.num_prompts, "prompt")} prefilled for others`;
  const { decisions = {}, peers = [] } = handover?.borrower ?? {};
  const up = peers.filter(({ state }) => state === "up").length;
  return handover ? `; ${counted(decisions.there ?? 0, "prompt")} prefilled by ${counted(up, "prefill engine")}` : "";
}

function tail(found) {
  if (!found?.count) return "no samples";
  const point = isKnown(found.p99) ? "p99" : "p90";
  return isKnown(found[point]) ? `${point} ${duration(found[point])}` : counted(found.count, "sample");
}
