// Keeps conversations in the browser, bounded in number and size, and moves them in and out as JSON.

import { newChoice } from "./answer.js";
import { defaultSettings, FIELDS } from "./settings.js";

const KEY = "twostroke.conversations";
const MAX_CONVERSATIONS = 60;
const MAX_CHARACTERS = 3_000_000; // of JSON; browsers give a page some five million
const MAX_NAME = 80;
const MAX_STEPS = 64; // replies to results, one behind the other, in a turn that is read
const TOO_MUCH = new Set(["tokens", "pieces"]);
const FORMAT = "twostroke-conversations-1";

/**
 * A fresh conversation; `settings` are those of columns A and B.
 *
 * `kind` is "chat", or "text" for one that is continued as it stands: that has a single turn.
 */
export function newConversation(kind = "chat", settings = [defaultSettings(kind), defaultSettings(kind)], isSplit = false) {
  const turns = kind === "text" ? [newTurn("")] : [];
  return { id: newId(), kind, title: "", name: "", changed: Date.now(), isSplit, settings: structuredClone(settings), turns };
}

/**
 * A message with its attached files, or a text with what stands behind it.
 *
 * `marks` are the parts that the model wrote.
 */
export function newTurn(prompt, files = []) {
  return { id: newId(), prompt, files, suffix: "", marks: [], replies: [] };
}

export function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** The conversations, the latest first. */
export class Store {
  constructor() {
    this.all = this.#read();
  }

  /** Keep a conversation; empty ones are not worth it. */
  keep(conversation) {
    conversation.changed = Date.now();
    conversation.title = titleOf(conversation);
    this.all = this.all.filter((one) => one.id !== conversation.id);
    if (!isEmpty(conversation)) this.all.unshift(conversation);
    this.#write();
  }

  /** Give a conversation a name of the user's; an empty one takes it away. */
  rename(conversation, name) {
    conversation.name = name.trim().slice(0, MAX_NAME);
    conversation.title = titleOf(conversation);
    this.#write();
  }

  /** Return the conversations in which all words of a search stand, in any case. */
  find(search) {
    const words = search.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.all;
    return this.all.filter((conversation) => {
      const text = wordsOf(conversation);
      return words.every((word) => text.includes(word));
    });
  }

  has(id) {
    return this.all.some((one) => one.id === id);
  }

  remove(id) {
    this.all = this.all.filter((one) => one.id !== id);
    this.#write();
  }

  /** Put conversations beside those that are there; return how many were taken. */
  add(conversations) {
    const ids = new Set(conversations.map((one) => one.id));
    this.all = [...conversations, ...this.all.filter((one) => !ids.has(one.id))];
    this.#write();
    return conversations.length;
  }

  #read() {
    try {
      return importAll(localStorage.getItem(KEY) ?? exportAll([]));
    } catch {
      return []; // of another version, or storage is forbidden
    }
  }

  /** The oldest give way when there are too many, or when the browser has no more room. */
  #write() {
    this.all = this.all.slice(0, MAX_CONVERSATIONS);
    let kept = this.all;
    while (kept.length) {
      const text = exportAll(kept);
      if (text.length <= MAX_CHARACTERS && tryToSet(text)) return;
      kept = kept.slice(0, -1);
    }
    tryToSet(exportAll([]));
  }
}

/** Return conversations as a text to keep. What each token could have been is too much to keep. */
export function exportAll(conversations) {
  const body = { format: FORMAT, conversations };
  return JSON.stringify(body, (key, value) => (TOO_MUCH.has(key) ? undefined : value));
}

/**
 * Return the conversations of such a text.
 *
 * Throws an Error with a sentence for the user if it is none.
 */
export function importAll(text) {
  let body;
  try {
    body = JSON.parse(text);
  } catch {
    throw new Error("This file is not JSON.");
  }
  if (body?.format !== FORMAT || !Array.isArray(body.conversations)) {
    throw new Error("This file has no conversations of this page.");
  }
  return body.conversations.map(readConversation);
}

function readConversation(found) {
  const conversation = newConversation(found?.kind === "text" ? "text" : "chat");
  if (typeof found?.id === "string") conversation.id = found.id;
  if (Number.isFinite(found?.changed)) conversation.changed = found.changed;
  conversation.isSplit = found?.isSplit === true;
  conversation.settings = [0, 1].map((place) => readSettings(found?.settings?.[place], conversation.kind));
  conversation.name = text(found?.name).slice(0, MAX_NAME);
  const turns = list(found?.turns).map(readTurn);
  if (conversation.kind === "chat") conversation.turns = turns;
  else if (turns.length) conversation.turns = turns.slice(0, 1);
  conversation.title = titleOf(conversation);
  return conversation;
}

function readTurn(found) {
  const turn = newTurn(text(found?.prompt));
  turn.suffix = text(found?.suffix);
  turn.files = list(found?.files).map((file) => ({ name: text(file?.name), text: text(file?.text) }));
  turn.replies = list(found?.replies).slice(0, 2).map((reply) => readReply(reply));
  let place = 0;
  for (const { start, end } of list(found?.marks).filter(Boolean)) {
    if (!(Number.isInteger(start) && Number.isInteger(end) && place <= start && start < end && end <= turn.prompt.length)) continue;
    turn.marks.push({ start, end, base: start, pieces: [] });
    place = end;
  }
  return turn;
}

function readSettings(found, kind) {
  const settings = defaultSettings(kind);
  for (const { name } of FIELDS) {
    if (typeof found?.[name] === typeof settings[name]) settings[name] = found[name];
  }
  return settings;
}

function readReply(found, step = 0) {
  const choices = list(found?.choices).map((choice) => ({
    ...newChoice(),
    text: text(choice?.text),
    lead: text(choice?.text).length,
    start: [...text(choice?.text)].length,
    reasoning: text(choice?.reasoning),
    calls: list(choice?.calls).map((call) => ({
      id: text(call?.id) || `call_${newId()}`,
      name: text(call?.name),
      arguments: text(call?.arguments),
      result: text(call?.result),
    })),
    finish: text(choice?.finish),
    error: text(choice?.error),
    isEdited: choice?.isEdited === true,
    figures: choice?.figures && typeof choice.figures === "object" ? choice.figures : null,
    after: choice?.after && step < MAX_STEPS ? readReply(choice.after, step + 1) : null,
  }));
  const shown = Number.isInteger(found?.shown) ? found.shown : 0;
  return { choices, shown: Math.min(Math.max(shown, 0), Math.max(choices.length - 1, 0)) };
}

function isEmpty({ turns }) {
  return !turns.some(({ prompt, suffix, files, replies }) => prompt || suffix || files.length || replies.some((reply) => reply?.choices.length));
}

function titleOf({ name, turns }) {
  if (name) return name;
  const first = turns[0]?.prompt.trim().split("\n")[0] || turns[0]?.files[0]?.name || "";
  return first.length > 80 ? `${first.slice(0, 79)}…` : first;
}

/** Return all that was said in a conversation, and its name, in small letters. */
function wordsOf({ title, turns }) {
  const said = [title];
  const read = (reply) => {
    for (const choice of reply?.choices ?? []) {
      said.push(choice.text);
      read(choice.after);
    }
  };
  for (const { prompt, suffix, files, replies } of turns) {
    said.push(prompt, suffix, ...files.map((file) => file.name));
    replies.forEach(read);
  }
  return said.join("\n").toLowerCase();
}

function tryToSet(value) {
  try {
    localStorage.setItem(KEY, value);
    return true;
  } catch {
    return false;
  }
}

function list(value) {
  return Array.isArray(value) ? value : [];
}

function text(value) {
  return typeof value === "string" ? value : "";
}
