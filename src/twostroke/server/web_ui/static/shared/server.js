// What the page asks the server, besides answers: is it there, and which model does it run?

import { hasKey, keyHeaders, wantKey } from "./key.js";

const LOOK_EVERY_MS = 800; // so that the lamp is red within a second of a lost server
const PATIENCE_MS = 3000;

/** Errors that are sentences for the user. */
export class ServerError extends Error {
  constructor(message, { status = 0, param = null } = {}) {
    super(message);
    this.status = status;
    this.param = param;
  }
}

// The server's own sentence is for those who write clients.
const KEY_NEEDED = "This server needs an API key: ask its operator for one.";
export const GONE = "The server cannot be reached. Is it running?";

/**
 * Return the response to a request, or throw a `ServerError` that says what is wrong.
 *
 * Where a key is wanted the user is asked for it, and the request is made again; `isForUser` says
 * that they have just asked for this, and are asked though they have declined before. `onSend` is
 * called each time that it is made.
 */
export async function ask(path, { isForUser = false, onSend = () => {}, ...options } = {}) {
  for (;;) {
    onSend();
    const response = await send(path, options);
    if (response.ok) return response;
    const error = await refusal(response);
    if (error.status !== 401 || !(await wantKey(error.message, isForUser))) throw error;
  }
}

async function send(path, options) {
  const headers = { ...options.headers, ...keyHeaders() };
  try {
    return await fetch(path, { cache: "no-store", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError(GONE);
  }
}

async function refusal(response) {
  const { status } = response;
  if (status === 401 && !hasKey()) return new ServerError(KEY_NEEDED, { status });
  try {
    const { error } = await response.json();
    return new ServerError(error.message, { status, param: error.param });
  } catch {
    return new ServerError(`The server answered with status ${status}.`, { status });
  }
}

/** Keeps looking whether the server answers; tells `onChange` of `{status, model}`. */
export function watchServer(onChange) {
  let last = "";
  let isLooking = false;
  const look = async () => {
    if (document.hidden || isLooking) return;
    isLooking = true;
    const found = await state();
    isLooking = false;
    if (JSON.stringify(found) === last) return;
    last = JSON.stringify(found);
    onChange(found);
  };
  setInterval(look, LOOK_EVERY_MS);
  document.addEventListener("visibilitychange", look);
  look();
}

/** Return what the server says of its models: the id, the capabilities and the status of each. */
export async function listModels() {
  try {
    return (await (await ask("v1/models")).json()).data;
  } catch {
    return []; // the lamp tells that it is gone
  }
}

async function state() {
  try {
    const response = await fetch("health", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
    const { status, model } = await response.json();
    return { status, model };
  } catch {
    return { status: "gone", model: null };
  }
}
