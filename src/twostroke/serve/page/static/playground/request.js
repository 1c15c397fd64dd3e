// Builds the request for an answer from a conversation and its settings.

import { toFields } from "./settings.js";

export const PATH = "v1/chat/completions";

/**
 * Return the body of the request for a column's answer to its turn at `place`.
 *
 * `begun` is the text of an answer that is to go on. Throws an Error with a sentence for the user.
 */
export function toBody(conversation, column, place, model, begun = "") {
  const settings = conversation.settings[column];
  const messages = [];
  if (settings.system.trim()) messages.push({ role: "system", content: settings.system });
  conversation.turns.slice(0, place + 1).forEach((turn, index) => {
    messages.push({ role: "user", content: turn.prompt });
    const choice = index < place ? shownChoice(turn, column) : null;
    if (choice?.text) messages.push({ role: "assistant", content: choice.text });
  });
  const body = { model, messages, ...toFields(settings), stream: true };
  body.stream_options = { include_usage: true };
  body.return_timings = true;
  if (begun) {
    messages.push({ role: "assistant", content: begun });
    body.continue_final_message = true;
  }
  return body;
}

/** Return the answer that a column shows to a turn, or null. */
export function shownChoice(turn, column) {
  const reply = turn.replies[column];
  return reply?.choices[reply.shown] ?? null;
}
