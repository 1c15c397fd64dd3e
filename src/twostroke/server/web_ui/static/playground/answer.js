// Collects one or more choices of a streamed answer, with the times at which they came.

import { chunks } from "./stream.js";

/** An answer, begun with that of another choice if it is to go on; `lead` of its letters have no tokens. */
export function newChoice(begun = null) {
  const text = begun?.text ?? "";
  const tokens = begun?.tokens ? [...begun.tokens] : null;
  const lead = tokens ? begun.lead : text.length;
  return { text, lead, start: [...text].length, tokens, reasoning: "", calls: [], finish: "", error: "", isEdited: false, figures: null, after: null };
}

/** A place for choices. A turn has one for each column; a choice that calls tools has one `after` it. */
export function newReply() {
  return { choices: [], shown: 0 };
}

/**
 * Stream the answer to a request into `choices`, one for each that was asked for.
 *
 * `onNews` is called after each chunk. Whatever goes wrong is kept in the choices; nothing is thrown.
 */
export async function collect({ path, body }, choices, signal, onNews) {
  const clock = new Clock(choices.length);
  try {
    for await (const chunk of chunks(path, body, signal, () => clock.start())) {
      if (chunk.usage) clock.usage = chunk.usage;
      for (const part of chunk.choices) {
        const delta = part.delta ?? { content: part.text }; // of a chat, of a text
        take(choices[part.index], delta, part);
        if (part.timings) clock.timings[part.index] = part.timings;
        if (hasText(delta)) clock.tick(part.index);
      }
      onNews();
    }
  } catch (error) {
    for (const choice of choices) {
      if (choice.finish) continue;
      if (error.name === "AbortError") choice.finish = "stopped";
      else choice.error = error.message;
    }
  }
  choices.forEach((choice, index) => {
    choice.calls = choice.calls.filter(Boolean); // a gap would be a call that never came
    choice.figures = clock.figures(index);
  });
  onNews();
}

function take(choice, delta, { finish_reason: finish, logprobs }) {
  choice.text += delta.content ?? "";
  choice.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (choice.calls[piece.index] ??= { id: "", name: "", arguments: "", result: "" });
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
  const isReasoning = delta.reasoning_content || delta.reasoning; // whose tokens are not shown
  if (logprobs && !isReasoning) (choice.tokens ??= []).push(...(logprobs.content ?? toTokens(logprobs, choice.start)));
  if (finish) choice.finish = finish;
}

function hasText(delta) {
  return Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls);
}

/** Return the tokens of a completion in the form that chats have; `offset` counts characters of the choice's text. */
function toTokens({ tokens, token_logprobs: logprobs, top_logprobs: tops, text_offset: offsets }, start) {
  return tokens.map((token, index) => {
    const top = Object.entries(tops[index] ?? {}).sort(([, one], [, other]) => other - one);
    const others = top.map(([name, logprob]) => ({ token: name, logprob, bytes: bytesOf(name) }));
    return { token, logprob: logprobs[index], bytes: bytesOf(token), top_logprobs: others, offset: start + offsets[index] };
  });
}

/** A part of a character is spelled bytes:\xf0\x9f. */
function bytesOf(name) {
  if (!/^bytes:(?:\\x[\da-f]{2})+$/.test(name)) return [...new TextEncoder().encode(name)];
  return name.slice("bytes:\\x".length).split("\\x").map((pair) => parseInt(pair, 16));
}

/** When the pieces came, as this browser saw it, beside what the server says. */
class Clock {
  #start = 0;
  #first = [];
  #last = [];

  constructor(numChoices) {
    this.numChoices = numChoices;
    this.usage = null;
    this.timings = [];
  }

  start() {
    this.#start = performance.now();
  }

  tick(index) {
    this.#last[index] = performance.now();
    this.#first[index] ??= this.#last[index];
  }

  /** Return what is shown under a choice; usage is of all choices together. */
  figures(index) {
    const [first, last] = [this.#first[index], this.#last[index]];
    const tokens = this.usage?.completion_tokens ?? null;
    const isAlone = this.numChoices === 1;
    const elapsed_s = (last - first) / 1000;
    return {
      ttft_s: first === undefined ? null : (first - this.#start) / 1000,
      total_s: last === undefined ? null : (last - this.#start) / 1000,
      tokens_per_s: isAlone && tokens > 1 && elapsed_s > 0 ? (tokens - 1) / elapsed_s : null,
      numChoices: this.numChoices,
      completion_tokens: tokens,
      prompt_tokens: this.usage?.prompt_tokens ?? null,
      cached_tokens: this.usage?.prompt_tokens_details?.cached_tokens ?? null,
      accepted: this.usage?.completion_tokens_details?.accepted_prediction_tokens ?? null,
      rejected: this.usage?.completion_tokens_details?.rejected_prediction_tokens ?? null,
      server: this.timings[index] ?? null,
    };
  }
}
