// Cuts Markdown into blocks: paragraphs, code, lists, tables, quotes. Line by line, in linear time.

const FENCE = /^( {0,3})(`{3,}|~{3,}(?!~))([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:[ \t]+(.*))?$/;
const RULE = /^ {0,3}(?:(?:\*[ \t]*){3,}|(?:-[ \t]*){3,}|(?:_[ \t]*){3,})$/;
const ITEM = /^( {0,12})([-*+]|\d{1,9}[.)])([ \t]+|$)(.*)$/;
const QUOTE = /^ {0,3}> ?/;
const DIVIDER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(?:\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;
const MAX_DEPTH = 12;

/**
 * Return the blocks of a text.
 *
 * Each has a `kind` and the lines `source` that it came from, so that who draws a growing text can
 * leave alone what has not changed.
 */
export function toBlocks(text, depth = 0) {
  const lines = text.split("\n");
  const blocks = [];
  let at = 0;
  while (at < lines.length) {
    if (lines[at].trim() === "") {
      at += 1;
      continue;
    }
    const read = depth < MAX_DEPTH ? READERS.find((reader) => reader.begins(lines, at)) : PARAGRAPH;
    const [block, next] = read.take(lines, at, depth);
    block.source = lines.slice(at, next).join("\n");
    blocks.push(block);
    at = next;
  }
  return blocks;
}

const CODE = {
  begins: (lines, at) => FENCE.test(lines[at]),
  take(lines, at) {
    const [, indent, marks, info] = FENCE.exec(lines[at]);
    let end = at + 1;
    while (end < lines.length && !closes(lines[end], marks)) end += 1;
    const body = lines.slice(at + 1, end).map((line) => dedent(line, indent.length));
    const language = info.trim().split(/\s/)[0];
    const isOpen = end === lines.length;
    return [{ kind: "code", language, text: body.join("\n"), isOpen }, isOpen ? end : end + 1];
  },
};

function closes(line, marks) {
  const bare = line.trim();
  return bare.length >= marks.length && bare === marks[0].repeat(bare.length);
}

const TITLE = {
  begins: (lines, at) => HEADING.test(lines[at]),
  take(lines, at) {
    const [, marks, words = ""] = HEADING.exec(lines[at]);
    return [{ kind: "heading", level: marks.length, text: words.replace(/[ \t]+#+[ \t]*$/, "") }, at + 1];
  },
};

const LINE = {
  begins: (lines, at) => RULE.test(lines[at]),
  take: (_lines, at) => [{ kind: "rule" }, at + 1],
};

const QUOTED = {
  begins: (lines, at) => QUOTE.test(lines[at]),
  take(lines, at, depth) {
    let next = at;
    while (next < lines.length && QUOTE.test(lines[next])) next += 1;
    const inner = lines.slice(at, next).map((line) => line.replace(QUOTE, "")).join("\n");
    return [{ kind: "quote", blocks: toBlocks(inner, depth + 1) }, next];
  },
};

const LIST = {
  begins: (lines, at) => ITEM.test(lines[at]),
  take(lines, at, depth) {
    const [, , first] = ITEM.exec(lines[at]);
    const isOrdered = /\d/.test(first);
    const items = [];
    let isLoose = false;
    let next = at;
    while (next < lines.length) {
      const begun = ITEM.exec(lines[next]);
      if (!begun || /\d/.test(begun[2]) !== isOrdered || RULE.test(lines[next])) break;
      const [body, end, hasGap] = takeItem(lines, next, begun);
      items.push(toBlocks(body, depth + 1));
      const following = skipBlank(lines, end);
      isLoose ||= hasGap;
      next = following < lines.length && ITEM.test(lines[following]) ? following : end;
      if (next === end && end < lines.length && lines[end]?.trim() === "") break;
    }
    return [{ kind: "list", isOrdered, start: Number.parseInt(first, 10) || 0, isLoose, items }, next];
  },
};

/** An item's lines: its own, those indented below it, and lazy ones that go on its paragraph. */
function takeItem(lines, at, [, indent, mark, gap, rest]) {
  const width = indent.length + mark.length + (gap.length > 4 || gap === "" ? 1 : gap.length);
  const body = [rest];
  let next = at + 1;
  let hasGap = false;
  while (next < lines.length) {
    const line = lines[next];
    if (line.trim() === "") {
      const after = skipBlank(lines, next);
      if (after >= lines.length || indentOf(lines[after]) < Math.min(width, indent.length + 2)) break;
      hasGap = true;
      body.push(...Array(after - next).fill(""));
      next = after;
      continue;
    }
    const isInside = indentOf(line) >= Math.min(width, indent.length + 2);
    if (!isInside && beginsBlock(lines, next)) break;
    body.push(dedent(line, width));
    next += 1;
  }
  return [body.join("\n"), next, hasGap];
}

const TABLE = {
  begins: (lines, at) =>
    lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-")
    && DIVIDER.test(lines[at + 1]) && cells(lines[at]).length === cells(lines[at + 1]).length,
  take(lines, at) {
    const sides = cells(lines[at + 1]).map(sideOf);
    let next = at + 2;
    while (next < lines.length && lines[next].trim() !== "" && lines[next].includes("|")) next += 1;
    const rows = lines.slice(at + 2, next).map(cells);
    return [{ kind: "table", head: cells(lines[at]), sides, rows }, next];
  },
};

function cells(line) {
  const bare = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return bare.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function sideOf(mark) {
  if (mark.endsWith(":")) return mark.startsWith(":") ? "center" : "right";
  return "left";
}

const PARAGRAPH = {
  begins: () => true,
  take(lines, at) {
    let next = at + 1;
    while (next < lines.length && lines[next].trim() !== "" && !interrupts(lines, next)) next += 1;
    return [{ kind: "paragraph", text: lines.slice(at, next).join("\n") }, next];
  },
};

const READERS = [CODE, TITLE, LINE, QUOTED, LIST, TABLE, PARAGRAPH];

function beginsBlock(lines, at) {
  return [CODE, TITLE, LINE, QUOTED, LIST].some((reader) => reader.begins(lines, at));
}

/** Only a list that begins with 1 may follow a paragraph's line at once: "in\n1914. Then" is text. */
function interrupts(lines, at) {
  if (TABLE.begins(lines, at)) return true;
  const item = ITEM.exec(lines[at]);
  if (item && !RULE.test(lines[at])) return item[4] !== "" && (!/\d/.test(item[2]) || /^1[.)]/.test(item[2]));
  return beginsBlock(lines, at);
}

function skipBlank(lines, at) {
  let next = at;
  while (next < lines.length && lines[next].trim() === "") next += 1;
  return next;
}

function indentOf(line) {
  return line.length - line.trimStart().length;
}

function dedent(line, width) {
  return line.slice(Math.min(width, indentOf(line)));
}
