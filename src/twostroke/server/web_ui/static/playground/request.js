// Builds the request for an answer from a conversation and its settings.

import { withFiles } from "./attachments.js";
import { toFields, toolFields } from "./settings.js";

const CHAT = "v1/chat/completions";
const TEXT = "v1/completions";

/**
 * Return the path and the body of the request for a column's reply to a turn.
 *
 * `reply` is one of the turn's, by itself its first one; `begun` is the text of an answer that is
 * to go on. Throws an Error with a sentence for the user.
 */
export function toRequest(conversation, turn, column, model, { reply = turn.replies[column], begun = "" } = {}) {
  const settings = conversation.settings[column];
  const isText = conversation.kind === "text";
  const asked = isText ? textFields(turn, settings, begun) : chatFields(conversation, turn, column, reply, begun);
  const body = { model, ...asked, ...toFields(settings, conversation.kind), stream: true };
  body.stream_options = { include_usage: true };
  body.return_timings = true;
  return { path: isText ? TEXT : CHAT, body };
}

/** Return the choice that a reply shows, or null. */
export function shownOf(reply) {
  return reply?.choices[reply.shown] ?? null;
}

/** Return the last of a turn's replies: behind each choice that called tools stands another. */
export function lastReply(turn, column) {
  let reply = turn.replies[column];
  while (shownOf(reply)?.after) reply = shownOf(reply).after;
  return reply;
}

function textFields({ prompt, suffix }, settings, begun) {
  if (!prompt && !suffix && !begun) throw new Error("Write some text first: the model continues it.");
  const fields = { prompt: prompt + begun };
  if (suffix) fields.suffix = suffix;
  if (settings.logprobs) fields.logprobs = 5;
  return fields;
}

function chatFields({ settings, turns }, turn, column, reply, begun) {
  const own = settings[column];
  const messages = [];
  if (own.system.trim()) messages.push({ role: "system", content: own.system });
  for (const one of turns) {
    messages.push({ role: "user", content: withFiles(one.prompt, one.files) });
    messages.push(...steps(one.replies[column], one === turn ? reply : null, one === turn));
    if (one === turn) break;
  }
  const fields = { messages, ...toolFields(own, reply === turn.replies[column]) };
  if (own.logprobs) Object.assign(fields, { logprobs: true, top_logprobs: 5 });
  if (begun) {
    messages.push({ role: "assistant", content: begun });
    fields.continue_final_message = true;
  }
  return fields;
}

/**
 * Yield the messages from a turn's first reply up to `end`, which is another step of the same turn.
 *
 * Calls go along when their results were sent. What the model thought goes along within the turn
 * that it is still busy with: templates know how to show it there.
 */
function* steps(first, end, isOpen) {
  for (let reply = first; reply && reply !== end;) {
    const choice = shownOf(reply);
    if (!choice) return;
    const calls = choice.after ? choice.calls : [];
    const message = { role: "assistant", content: choice.text || null };
    if (isOpen && choice.reasoning) message.reasoning_content = choice.reasoning;
    if (calls.length) message.tool_calls = calls.map(toCall);
    if (choice.text || calls.length) yield message;
    for (const { id, result } of calls) yield { role: "tool", tool_call_id: id, content: result };
    reply = choice.after;
  }
}

function toCall({ id, name, arguments: given }) {
  return { id, type: "function", function: { name, arguments: given } };
}
