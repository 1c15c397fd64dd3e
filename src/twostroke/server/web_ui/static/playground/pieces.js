// Tokens as whole characters: the shade of each, and the card that tells what else might have stood there.

import { h } from "../shared/dom.js";
import { percent } from "../shared/format.js";

const SHADES = [0.9, 0.7, 0.5, 0.3, 0.1]; // the probability below which the next shade begins
const MOST_IN_PIECE = 8; // tokens; no character has more bytes that could be apart

/**
 * Yield pieces of whole characters, each with its tokens.
 *
 * A token may be a part of a character, so bytes decide: tokens belong together until their bytes
 * are UTF-8. `open` is the last piece so far; if it waits for more, it is yielded again.
 */
export function* toPieces(tokens, open) {
  let piece = open?.isOpen ? open : null;
  for (const token of tokens) {
    piece ??= { tokens: [], text: "", isOpen: true };
    piece.tokens.push(token);
    const bytes = Uint8Array.from(piece.tokens.flatMap((one) => one.bytes ?? [...new TextEncoder().encode(one.token)]));
    const text = decode(bytes);
    piece.isOpen = text === null && piece.tokens.length < MOST_IN_PIECE;
    piece.text = text ?? "�";
    if (!piece.isOpen) {
      yield piece;
      piece = null;
    }
  }
  if (piece) yield piece;
}

/** Return the class of a piece's shade: that of its least likely token. */
export function shadeOf(piece) {
  const least = leastShare(piece);
  return `shade-${SHADES.filter((limit) => least < limit).length}`;
}

/** Return a piece in words. */
export function labelOf(piece) {
  return `${visible(piece.text)}, ${percent(leastShare(piece))}`;
}

/** Return what a card says of a piece. */
export function cardOf(piece) {
  return piece.tokens.map(drawCard);
}

/** Put a card below an element, both within `whole`. */
export function placeCard(card, element, whole) {
  const frame = whole.getBoundingClientRect();
  const line = element.getClientRects()[0] ?? frame;
  card.style.left = "0"; // its width is measured where it has all the room
  const left = Math.min(line.left - frame.left, frame.width - card.offsetWidth);
  card.style.left = `${Math.max(left, 0)}px`;
  card.style.top = `${line.bottom - frame.top + 4}px`;
}

/** Return the line that explains the shades. */
export function legend() {
  const swatches = [0, ...SHADES.keys()].map((_, shade) => h(`span.swatch.shade-${shade}`));
  return h("p.legend", {}, "How likely each token was: ", h("span", {}, "over 90 %", h("span.swatches", { "aria-hidden": "true" }, swatches), "under 10 %"));
}

function leastShare(piece) {
  return Math.min(...piece.tokens.map((token) => Math.exp(token.logprob)));
}

function drawCard(token) {
  const others = (token.top_logprobs ?? []).map((other) => {
    const isOwn = String(other.bytes) === String(token.bytes);
    const share = Math.exp(other.logprob);
    const bar = h("span.bar-of", { "aria-hidden": "true" }, h("span"));
    bar.firstChild.style.width = `${Math.round(share * 100)}%`;
    return h(`li${isOwn ? ".own" : ""}`, {}, h("code", {}, spell(other)), bar, h("span.share", {}, percent(share)));
  });
  const own = h("p", {}, h("code", {}, spell(token)), h("span", {}, ` ${percent(Math.exp(token.logprob))}, log-probability ${token.logprob.toFixed(2)}`));
  return h("div", {}, own, h("ol", {}, others));
}

/** Return how a token looks, its bytes where it is no text. */
function spell({ token, bytes }) {
  const text = bytes ? decode(Uint8Array.from(bytes)) : token;
  if (text === null) return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return visible(text);
}

function visible(text) {
  return text.replaceAll(" ", "␣").replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "(nothing)";
}

function decode(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(bytes);
  } catch {
    return null;
  }
}
