// The plan: what the served model could do with another load, other formats, other devices.

import { h } from "../shared/dom.js";
import { count, counted, duration, quantity, rate } from "../shared/format.js";
import { ask } from "../shared/server.js";
import { Controls } from "./controls.js";
import { LatencyPlot } from "./latency.js";
import { MemoryBar } from "./memory.js";
import { RooflinePlot } from "./roofline.js";
import { loadsTable, streamsTable, whatIfTable } from "./tables.js";

const PATH = "api/plan";
const PAUSE_MS = 60; // between a slider's move and the request

export class Planning {
  #place;
  #controls = null;
  #plan = null;
  #isVisible = false;
  #isAsking = false;
  #isChanged = false;
  #trouble = h("p.trouble", { role: "alert", hidden: true });
  #about = h("p.about");
  #answer = h("p.plan-answer", { role: "status" });
  #tiles = h("dl.tiles");
  #roofline = new RooflinePlot();
  #latency = new LatencyPlot();
  #memory = new MemoryBar();
  #tables = h("div.cards");
  #formulas = h("ul.formulas");
  #results;
  #body;

  constructor(place) {
    this.#place = place;
    const head = h("header.dashboard-head", {}, h("h2", {}, "Plan"), this.#about);
    const plots = h("div.cards.two", {}, this.#roofline.element, this.#latency.element);
    const formulas = h("details.card", {}, h("summary", {}, "Each formula with its numbers"), this.#formulas);
    this.#results = h("div.plan-results", { hidden: true }, this.#tiles, this.#answer, plots, this.#memory.element, this.#tables, formulas);
    this.#body = h("div.plan-body", {}, this.#results);
    place.append(h("div.dashboard", {}, head, this.#trouble, this.#body));
    new ResizeObserver(() => this.#draw()).observe(place);
  }

  setVisible(isVisible) {
    this.#isVisible = isVisible;
    if (isVisible && !this.#controls) this.#begin();
    else this.#draw();
  }

  async #begin() {
    try {
      const choices = await (await ask(PATH, { isForUser: true })).json();
      if (this.#controls) return; // asked twice
      this.#controls = new Controls(choices, () => this.#change());
      this.#body.prepend(this.#controls.element);
      this.#change();
    } catch (error) {
      this.#complain(error);
    }
  }

  /** Ask for a plan of what is set; changes while it is made are asked for after it. */
  async #change() {
    this.#isChanged = true;
    if (this.#isAsking) return;
    this.#isAsking = true;
    while (this.#isChanged) {
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
      this.#isChanged = false;
      await this.#ask();
    }
    this.#isAsking = false;
  }

  async #ask() {
    try {
      const body = JSON.stringify(this.#controls.fields());
      const response = await ask(PATH, { method: "POST", headers: { "content-type": "application/json" }, body });
      this.#plan = await response.json();
      this.#trouble.hidden = true;
      this.#results.classList.remove("stale");
      this.#draw();
    } catch (error) {
      this.#complain(error);
    }
  }

  #complain(error) {
    this.#trouble.textContent = error.message;
    this.#trouble.hidden = false;
    this.#results.classList.add("stale");
  }

  #draw() {
    const plan = this.#plan;
    if (!plan || !this.#isVisible) return;
    this.#results.hidden = false;
    this.#about.textContent = aboutOf(plan);
    this.#answer.textContent = answerOf(plan);
    this.#answer.dataset.kind = plan.chosen ? "right" : "wrong";
    const fits = fitsOf(plan);
    this.#tiles.replaceChildren(...(fits ? tilesOf(plan) : []));
    this.#roofline.show(plan);
    this.#latency.show(plan);
    this.#memory.show(plan);
    this.#tables.replaceChildren(...(fits ? [streamsTable(plan), ...loadsTable(plan), whatIfTable(plan)] : []));
    this.#formulas.replaceChildren(...plan.steps.map((line) => h("li", {}, line)));
  }
}

function aboutOf({ model, device, question, stored, calibrated, usual, roof }) {
  const devices = question.count > 1 ? `${question.count} × ${device}` : device;
  const parts = [`${model} (${stored}) on ${devices}`];
  if (calibrated) parts.push(`corrected by ${calibrated.num_steps} steps measured on ${counted(calibrated.num_threads, "thread")} on ${calibrated.date}${calibrated.error === null ? "" : `, median error ${Math.round(calibrated.error * 100)} %`}`);
  else if (usual) parts.push(`times are as far above the limits as those of ${usual}`);
  else parts.push("times are limits that no engine passes");
  if (roof.source) parts.push(roof.source);
  if (roof.price_source) parts.push(`price: ${roof.price_source}`);
  return parts.join(" · ");
}

/** Whether the context holds a request, and the memory as many streams as are asked: else no price counts. */
function fitsOf({ question, context_length, memory, shown }) {
  const isShortEnough = question.prompt + question.output <= context_length;
  return isShortEnough && memory.most_streams !== 0 && shown >= (question.streams ?? 1);
}

function answerOf({ chosen, verdict, bound, prefill_per_decode: ratio }) {
  if (!chosen) return verdict;
  const apart = ratio ? ` Prefill and decode apart: ${rate(ratio)} prefill devices for each that decodes.` : "";
  return `${counted(chosen.streams, "stream")}${bound && ` (limited by ${bound})`}: ${rate(chosen.tokens_per_s)} tokens/s, ${rate(1 / chosen.tpot_s)} for each.${apart}`;
}

function tilesOf(plan) {
  const row = plan.chosen ?? plan.rows.find(({ streams }) => streams === plan.shown) ?? plan.rows.at(-1);
  const { memory, roof } = plan;
  const usd = row.usd_per_million;
  return [
    tile("TTFT", "Time to first token among the other streams, without a queue", duration(row.ttft_s), plan.prefill_bottleneck),
    tile("TPOT", "Time per output token with this number of streams", duration(row.tpot_s), row.bottleneck),
    tile("Throughput", "Tokens per second of all streams, with prefill", `${rate(row.tokens_per_s)}/s`, `${rate(row.requests_per_s)} requests/s`),
    tile("Streams", "Requests that decode together", count(row.streams), memory.most_streams === null ? "memory is not known" : `${count(memory.most_streams)} fit`),
    tile("Memory", "Weights and KV cache", quantity(memory.weights + memory.kv_per_request * row.streams, "B"), memory.usable === null ? "the device's is not known" : `of ${quantity(memory.usable, "B")} usable`),
    tile("Cost", "Cost of a million output tokens, prefill included", usd === null ? "–" : `$${usd.toPrecision(3)}`, usd === null ? "no price is known" : `for 1M tokens, at $${roof.usd_per_hour.toPrecision(3)}/h`),
  ];
}

function tile(name, explanation, value, note) {
  return h("div.tile", {}, h("dt", {}, h("abbr", { title: explanation }, name)), h("dd.value", {}, value), h("dd.note", {}, note));
}
