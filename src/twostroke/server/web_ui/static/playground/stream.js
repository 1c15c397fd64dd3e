// Reads a streamed answer: server-sent events in, chunks out.

import { ask, ServerError } from "../shared/server.js";

/**
 * Post a request and yield its chunks as they come.
 *
 * Throws a `ServerError` for a refusal, for an error in the middle, and for an end without [DONE];
 * an AbortError when `signal` says so. `onSend` is called when the request goes out, again if it
 * does so again, with a key.
 */
export async function* chunks(path, body, signal, onSend) {
  const response = await ask(path, {
    method: "POST",
    headers: { "content-type": "application/json" },
    body: JSON.stringify(body),
    signal,
    isForUser: true,
    onSend,
  });
  const broken = new ServerError("The connection broke before the answer was complete.");
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    let piece;
    try {
      piece = await reader.read();
    } catch (error) {
      throw error.name === "AbortError" ? error : broken;
    }
    if (piece.done) throw broken;
    const lines = (rest + piece.value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data:")) continue; // blank lines, and comments that keep the line alive
      const data = line.slice(5).trim();
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message, { param: chunk.error.param });
      yield chunk;
    }
  }
}
