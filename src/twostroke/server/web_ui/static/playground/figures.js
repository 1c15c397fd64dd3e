// The figures under an answer: what this browser measured, beside what the server says.

import { h } from "../shared/dom.js";
import { count, counted, duration, isKnown, percent, rate } from "../shared/format.js";

const ENDS = {
  stop: "ended by itself",
  length: "cut by max tokens",
  tool_calls: "calls a tool",
  stopped: "stopped by you",
};

/** Return the line of figures under a choice, which opens into a table; null where there are none. */
export function figuresOf(choice) {
  const { figures } = choice;
  const parts = figures ? main(choice, figures) : [];
  if (!parts.length) return null;
  const line = h("summary", {}, parts.flatMap((part, index) => [index ? " · " : "", h("span.figure", {}, part)]));
  return h("details.figures", {}, line, table(figures));
}

function main(choice, figures) {
  const parts = [];
  if (isKnown(figures.ttft_s)) parts.push([h("abbr", { title: "Time to first token" }, "TTFT"), ` ${duration(figures.ttft_s)}`]);
  // Of a call the first piece comes late, when its name is known: what comes behind it is no measure.
  const speed = figures.server?.decode_tokens_per_s ?? figures.tokens_per_s;
  if (isKnown(speed)) parts.push([`${rate(speed)} tokens/s`]);
  if (isKnown(figures.completion_tokens)) parts.push([counted(figures.completion_tokens, "token"), figures.numChoices > 1 ? ` in ${figures.numChoices} answers` : ""]);
  if (figures.cached_tokens > 0) parts.push([`${count(figures.cached_tokens)} of ${count(figures.prompt_tokens)} prompt tokens cached`]);
  if (figures.accepted > 0) parts.push([`${count(figures.accepted)} of ${count(figures.accepted + figures.rejected)} drafts accepted`]);
  if (figures.form) parts.push([figures.form]);
  parts.push([choice.isEdited ? "edited by you" : (ENDS[choice.finish] ?? choice.finish)]);
  return parts.filter((part) => part[0]);
}

function table(figures) {
  const server = figures.server ?? {};
  const rows = [
    ["Time to first token", duration(figures.ttft_s), duration(server.ttft_s)],
    ["of that queue time", "", duration(server.queue_s)],
    ["Time to last token", duration(figures.total_s), duration(server.e2e_s)],
    ["Tokens per second after the first", rate(figures.tokens_per_s), rate(server.decode_tokens_per_s)],
    ["Prompt tokens", "", count(figures.prompt_tokens)],
    ["of these from the prefix cache", "", shareOf(figures.cached_tokens, figures.prompt_tokens)],
    ["Output tokens", "", count(figures.completion_tokens)],
    ["Accepted draft tokens", "", shareOf(figures.accepted, figures.accepted + figures.rejected)],
  ];
  const head = h("tr", {}, h("th", { scope: "col" }, h("span.unseen", {}, "Figure")), h("th", { scope: "col" }, "here"), h("th", { scope: "col" }, "server"));
  const body = rows.map(([name, here, there]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, here), h("td", {}, there)));
  return h("div.wide", {}, h("table.sheet", {}, h("thead", {}, head), h("tbody", {}, body)));
}

function shareOf(part, whole) {
  if (!isKnown(part)) return "–";
  return whole > 0 ? `${count(part)} (${percent(part / whole)})` : count(part);
}
