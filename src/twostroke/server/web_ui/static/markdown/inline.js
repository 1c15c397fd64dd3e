// Turns a line of Markdown into nodes: emphasis, code, links. Nothing is ever read as HTML.

import { h } from "../shared/dom.js";

const SPECIAL = /[\\`*_~[!<h]/g;
const ESCAPABLE = /[!-/:-@[-`{-~]/;
const ADDRESS = /https?:\/\/[^\s<>"'`]+/y;
const SAFE = /^(?:https?:|mailto:)/i;
const MAX_DEPTH = 8;
const MAX_REACH = 1000; // characters between a mark and its partner, which keeps reading linear

/** Return the nodes of a text. */
export function toNodes(text, depth = 0) {
  const nodes = [];
  let plain = "";
  let at = 0;
  const flush = () => {
    if (plain) nodes.push(...withBreaks(plain));
    plain = "";
  };
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const next = SPECIAL.exec(text)?.index ?? text.length;
    plain += text.slice(at, next);
    at = next;
    if (at >= text.length) break;
    const found = depth < MAX_DEPTH ? read(text, at, depth) : null;
    if (found) {
      const [node, end] = found;
      if (typeof node === "string") plain += node;
      else {
        flush();
        nodes.push(node);
      }
      at = end;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return nodes;
}

function read(text, at, depth) {
  switch (text[at]) {
    case "\\":
      return ESCAPABLE.test(text[at + 1] ?? "") ? [text[at + 1], at + 2] : null;
    case "`":
      return readCode(text, at);
    case "*":
    case "_":
    case "~":
      return readEmphasis(text, at, depth);
    case "!":
      return text[at + 1] === "[" ? readLink(text, at + 1, depth) : null; // a picture is not fetched
    case "[":
      return readLink(text, at, depth);
    case "<":
      return readBracketed(text, at);
    default:
      return readAddress(text, at);
  }
}

function readCode(text, at) {
  const marks = /`+/y;
  marks.lastIndex = at;
  const mark = marks.exec(text)[0];
  const last = at + MAX_REACH;
  let end = find(text, mark, at + mark.length, last);
  while (end >= 0 && (text[end + mark.length] === "`" || text[end - 1] === "`")) {
    end = find(text, mark, end + runAt(text, end), last);
  }
  if (end < 0) return [mark, at + mark.length];
  const inner = text.slice(at + mark.length, end).replaceAll("\n", " ");
  const isPadded = inner.startsWith(" ") && inner.endsWith(" ") && inner.trim() !== "";
  return [h("code", {}, isPadded ? inner.slice(1, -1) : inner), end + mark.length];
}

const WRAPS = { "***": ["em", "strong"], "**": ["strong"], "*": ["em"], "~~": ["del"] };

function readEmphasis(text, at, depth) {
  const letter = text[at];
  let length = 1;
  while (text[at + length] === letter) length += 1;
  const mark = letter.repeat(length);
  const tags = WRAPS[mark.replaceAll("_", "*")];
  const inside = at + length;
  if (!tags || /\s/.test(text[inside] ?? " ") || (letter === "_" && isWord(text[at - 1]))) {
    return [mark, inside];
  }
  const end = closing(text, inside, mark);
  if (end < 0) return [mark, inside];
  const children = toNodes(text.slice(inside, end), depth + 1);
  return [tags.reduceRight((inner, tag) => [h(tag, {}, inner)], children)[0], end + length];
}

function closing(text, from, mark) {
  const letter = mark[0];
  const last = from + MAX_REACH;
  let end = find(text, mark, from, last);
  while (end >= 0) {
    const after = text[end + mark.length];
    const isOwn = after !== letter && text[end - 1] !== letter && text[end - 1] !== "\\";
    if (end > from && isOwn && !/\s/.test(text[end - 1]) && !(letter === "_" && isWord(after))) return end;
    end = find(text, mark, end + (after === letter ? runAt(text, end) : 1), last);
  }
  return -1;
}

/** Return where a mark stands next, before `last`; -1 if nowhere. */
function find(text, mark, from, last) {
  const found = from < last ? text.slice(from, last).indexOf(mark) : -1;
  return found < 0 ? -1 : from + found;
}

function runAt(text, at) {
  let end = at;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

function readLink(text, at, depth) {
  const close = matching(text, at, "[", "]");
  if (close < 0 || text[close + 1] !== "(") return null;
  const end = matching(text, close + 1, "(", ")");
  if (end < 0) return null;
  const target = text.slice(close + 2, end).trim().split(/\s/)[0].replace(/^<|>$/g, "");
  const words = toNodes(text.slice(at + 1, close), depth + 1);
  return [link(target, words.length ? words : [target]), end + 1];
}

function matching(text, at, open, close) {
  let depth = 0;
  for (let i = at; i < Math.min(text.length, at + MAX_REACH); i += 1) {
    if (text[i] === "\\") i += 1;
    else if (text[i] === open) depth += 1;
    else if (text[i] === close) {
      depth -= 1;
      if (depth === 0) return i;
    }
  }
  return -1;
}

function readBracketed(text, at) {
  const end = find(text, ">", at, at + MAX_REACH);
  const inner = end < 0 ? "" : text.slice(at + 1, end);
  if (!SAFE.test(inner) || /\s/.test(inner)) return null;
  return [link(inner, [inner]), end + 1];
}

function readAddress(text, at) {
  if (isWord(text[at - 1])) return null;
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text);
  if (!found) return null;
  let address = found[0].replace(/[.,;:!?*_~\]]+$/, "");
  if (address.endsWith(")") && !address.includes("(")) address = address.slice(0, -1);
  return [link(address, [address]), at + address.length];
}

/** A link goes to the web or to a mailbox, nowhere else; what is no such address stays text. */
function link(target, words) {
  if (!SAFE.test(target)) return h("span", {}, words);
  return h("a", { href: target, target: "_blank", rel: "noopener noreferrer" }, words);
}

function withBreaks(text) {
  return text.split("\n").flatMap((line, index) => (index ? [h("br"), line] : [line])).filter((node) => node !== "");
}

function isWord(letter) {
  return letter !== undefined && /[\p{L}\p{N}_]/u.test(letter);
}
