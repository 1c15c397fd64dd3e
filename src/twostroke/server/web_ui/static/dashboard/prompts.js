// Where the prompts of the user's own key part from earlier ones, and what the repeated tokens cost.

import { h } from "../shared/dom.js";
import { count, counted, duration, percent } from "../shared/format.js";
import { ask } from "../shared/server.js";

const EVERY_MS = 5000;
const NUM_SHOWN = 10;
const MIN_REPEATED_SHARE = 0.5; // of the tokens after a point; with less there is nothing to move
const HEADS = [
  ["Part at token", "The number of tokens that these prompts share with an earlier prompt"],
  ["Prompts"],
  ["Tokens after", "Tokens after this point, which the prefix cache could not have"],
  ["Would hit", "How many of them earlier prompts have, too: the prefix cache would have them if the tokens that differ stood at the end"],
  ["Time", "Seconds of prefill that these tokens take, at this server's mean speed"],
];

export class Prompts {
  #body = h("tbody");
  #note = h("p.summary");
  #textBox = h("input", { type: "checkbox", id: "prompts-text", onchange: () => this.#ask() });
  #lastAsked_ms = -Infinity;

  constructor() {
    const heads = HEADS.map(([name, long]) => h("th", { scope: "col" }, long ? h("abbr", { title: long }, name) : name));
    const table = h("table.data", {}, h("thead", {}, h("tr", {}, heads)), this.#body);
    this.element = h(
      "section.card",
      { "aria-label": "Prompts that part", hidden: true },
      h("header", {}, h("h3", {}, "Prompts that part from earlier ones"), h("label.check", { for: "prompts-text" }, this.#textBox, " Show text")),
      h("div.wide", { tabindex: "0", role: "group", "aria-label": "Prompts that part" }, table),
      this.#note,
    );
  }

  /** Show the table if the server compares prompts; it is fetched at most every few seconds. */
  show(hasDoctor) {
    this.element.hidden = !hasDoctor;
    if (hasDoctor && performance.now() - this.#lastAsked_ms > EVERY_MS) this.#ask();
  }

  async #ask() {
    this.#lastAsked_ms = performance.now();
    const showsText = this.#textBox.checked;
    try {
      const response = await ask(`api/prompts${showsText ? "?show_text" : ""}`, { signal: AbortSignal.timeout(5000) });
      const report = await response.json();
      if (showsText === this.#textBox.checked) this.#fill(report);
    } catch (error) {
      this.#note.textContent = error.message;
    }
  }

  #fill({ num_prompts: prompts, num_tokens: tokens, partings, s_per_token: seconds }) {
    this.#body.replaceChildren(...partings.slice(0, NUM_SHOWN).flatMap((parting) => rows(parting, seconds)));
    const all = `${counted(prompts, "prompt")} with ${counted(tokens, "token")} since the server's start.`;
    this.#note.textContent = `${all} ${adviceFor(partings[0])}`;
  }
}

function rows({ position, num_prompts: prompts, num_after: after, num_repeated: repeated, before, after: text }, seconds) {
  const share = after ? ` (${percent(repeated / after)})` : "";
  const cells = [count(prompts), count(after), `${count(repeated)}${share}`, duration(seconds === null ? undefined : repeated * seconds)];
  const row = h("tr", {}, h("th", { scope: "row" }, count(position)), cells.map((cell) => h("td", {}, cell)));
  if (before === null) return [row];
  const excerpt = h("td.excerpt", { colspan: String(HEADS.length) }, `…${before}`, h("mark", {}, text), "…");
  return [row, h("tr", {}, excerpt)];
}

/** Say what to change, by the point that costs most. */
function adviceFor(worst) {
  if (!worst) return "No prompt parts from an earlier one.";
  const share = worst.num_after ? worst.num_repeated / worst.num_after : 0;
  if (share < MIN_REPEATED_SHARE) return "Nothing to move: most tokens after these points differ from earlier prompts.";
  return `At token ${count(worst.position)} something changes, and ${percent(share)} of the tokens after it are the same as in earlier prompts: put the changing part (a date, a name, an id) after them.`;
}
