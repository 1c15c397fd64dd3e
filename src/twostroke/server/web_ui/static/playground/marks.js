// Which parts of a text the model wrote, token by token, and how edits move them.

/** What the model wrote: from `start` to `end`; its pieces count from `base`. */
function newMark(start, length, pieces) {
  return { start, end: start + length, base: start, pieces };
}

/** Make a choice's text the end of the turn's own. */
export function takeInto(turn, choice) {
  if (!choice?.text) return;
  turn.marks.push(newMark(turn.prompt.length, choice.text.length, piecesOf(choice)));
  turn.prompt += choice.text;
}

/**
 * Make `value` the text that is shown, the turn's own and behind it the choice's; `caret` is where
 * the edit ended. Return whether the choice still is one: whoever writes in it or behind it takes it.
 */
export function editText(turn, choice, value, caret) {
  const whole = turn.prompt + (choice?.text ?? "");
  if (whole.includes("\r")) { // which fields of browsers do not hold
    takeInto(turn, choice);
    unify(turn);
    editText(turn, null, value, caret);
    return false;
  }
  const edit = difference(whole, value, caret);
  const isTaken = Boolean(choice?.text) && edit.end > turn.prompt.length;
  const isBehind = Boolean(choice?.text) && edit.start > turn.prompt.length;
  if (isTaken || isBehind) takeInto(turn, choice);
  const behind = isTaken || isBehind ? 0 : (choice?.text.length ?? 0);
  turn.prompt = value.slice(0, value.length - behind);
  turn.marks = turn.marks.flatMap((mark) => moved(mark, edit));
  return !isTaken && !isBehind;
}

/** Return a text with its lines broken as a field has them. */
export function unifyLines(text) {
  return text.replaceAll(/\r\n?/g, "\n");
}

function unify(turn) {
  const place = (before) => unifyLines(turn.prompt.slice(0, before)).length;
  turn.marks = turn.marks.map(({ start, end }) => ({ start: place(start), end: place(end), base: 0, pieces: [] }));
  turn.prompt = unifyLines(turn.prompt);
}

/** Take what the model wrote last away, if the text ends with it; return whether it did. */
export function takeBack(turn) {
  const last = turn.marks.at(-1);
  if (last?.end !== turn.prompt.length) return false;
  turn.prompt = turn.prompt.slice(0, last.start);
  turn.marks = turn.marks.slice(0, -1);
  return true;
}

/** Return `{start, end, length}`: from start to end of `before` there are `length` other letters now. */
function difference(before, after, caret) {
  const delta = after.length - before.length;
  const most = Math.min(before.length, after.length, Math.max(caret - Math.max(delta, 0), 0));
  let start = 0;
  while (start < most && before[start] === after[start]) start += 1;
  let same = 0; // letters at the end
  const room = Math.min(before.length, after.length) - start;
  while (same < room && before[before.length - 1 - same] === after[after.length - 1 - same]) same += 1;
  const end = before.length - same;
  return { start, end, length: end - start + delta };
}

function moved(mark, { start, end, length }) {
  const delta = length - (end - start);
  if (mark.end <= start) return [mark];
  if (mark.start >= end) return [{ ...mark, start: mark.start + delta, end: mark.end + delta, base: mark.base + delta }];
  const left = mark.start < start ? [{ ...mark, end: start }] : [];
  const right = mark.end > end ? [{ ...mark, start: start + length, end: mark.end + delta, base: mark.base + delta }] : [];
  return [...left, ...right];
}

/**
 * Return the pieces of a choice's text that tokens are known for: `{start, end, text, tokens}`.
 *
 * A token's place is told in characters, which may be two letters of JavaScript's each. Tokens that
 * begin at one place are parts of one character, or unseen ones before it.
 */
export function piecesOf({ text, tokens }) {
  const places = [0];
  for (const character of text) places.push(places.at(-1) + character.length);
  const pieces = [];
  for (const token of tokens ?? []) {
    const start = places[token.offset];
    if (start === undefined || start >= text.length) continue; // a stop string has cut it
    const last = pieces.at(-1);
    if (last?.start === start) last.tokens.push(token);
    else {
      if (last) last.end = start;
      pieces.push({ start, end: text.length, tokens: [token] });
    }
  }
  for (const piece of pieces) piece.text = text.slice(piece.start, piece.end);
  return pieces;
}
