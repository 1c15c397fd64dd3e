// Collects one or more choices of a streamed answer, with the times at which they came.

import { chunks } from "./stream.js";
import { PATH } from "./request.js";

export function newChoice(text = "") {
  return { text, reasoning: "", calls: [], finish: "", error: "", isEdited: false, figures: null, tokens: null };
}

/**
 * Stream the answer to `body` into `choices`, one for each that was asked for.
 *
 * `onNews` is called after each chunk. Whatever goes wrong is kept in the choices; nothing is thrown.
 */
export async function collect(body, choices, signal, onNews) {
  const clock = new Clock(choices.length);
  try {
    for await (const chunk of chunks(PATH, body, signal)) {
      if (chunk.usage) clock.usage = chunk.usage;
      for (const part of chunk.choices) {
        take(choices[part.index], part);
        if (part.timings) clock.timings[part.index] = part.timings;
        if (hasText(part.delta)) clock.tick(part.index);
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
    choice.figures = clock.figures(index);
  });
  onNews();
}

function take(choice, { delta, finish_reason: finish, logprobs }) {
  choice.text += delta.content ?? "";
  choice.reasoning += delta.reasoning_content ?? delta.reasoning ?? "";
  for (const piece of delta.tool_calls ?? []) {
    const call = (choice.calls[piece.index] ??= { id: "", name: "", arguments: "" });
    call.id ||= piece.id ?? "";
    call.name += piece.function?.name ?? "";
    call.arguments += piece.function?.arguments ?? "";
  }
  if (logprobs?.content) (choice.tokens ??= []).push(...logprobs.content);
  if (finish) choice.finish = finish;
}

function hasText(delta) {
  return Boolean(delta.content || delta.reasoning_content || delta.reasoning || delta.tool_calls);
}

/** When the pieces came, as this browser saw it, beside what the server says. */
class Clock {
  #start = performance.now();
  #first = [];
  #last = [];

  constructor(numChoices) {
    this.numChoices = numChoices;
    this.usage = null;
    this.timings = [];
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
