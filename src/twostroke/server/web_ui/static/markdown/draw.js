// Draws Markdown into an element, and of a growing text only the blocks that changed.

import { copy } from "../shared/clipboard.js";
import { h, iconButton } from "../shared/dom.js";
import { toBlocks } from "./blocks.js";
import { paint } from "./highlight.js";
import { toNodes } from "./inline.js";

const drawn = new WeakMap(); // element -> the sources of its blocks

/** Show `text` in `place`; return the source of each of its elements. */
export function draw(place, text) {
  const before = drawn.get(place) ?? [];
  const blocks = toBlocks(text);
  blocks.forEach((block, index) => {
    const isSame = before[index] === block.source && place.children[index];
    if (isSame && !block.isOpen) return;
    const element = toElement(block);
    if (place.children[index]) place.children[index].replaceWith(element);
    else place.append(element);
  });
  while (place.children.length > blocks.length) place.lastChild.remove();
  const sources = blocks.map((block) => block.source);
  drawn.set(place, sources);
  return sources;
}

const DRAW = {
  paragraph: ({ text }) => h("p", {}, toNodes(text)),
  heading: ({ level, text }) => h(`h${Math.min(level + 3, 6)}.as-h${Math.min(level, 4)}`, {}, toNodes(text)), // below the page's own
  rule: () => h("hr"),
  quote: ({ blocks }) => h("blockquote", {}, blocks.map(toElement)),
  code: ({ language, text }) => codeBlock(language, text),
  list: drawList,
  table: drawTable,
};

function toElement(block) {
  return DRAW[block.kind](block);
}

function drawList({ isOrdered, start, isLoose, items }) {
  const list = h(isOrdered ? "ol" : "ul", isOrdered && start !== 1 ? { start } : {});
  for (const blocks of items) {
    const isTight = !isLoose && blocks[0]?.kind === "paragraph";
    const first = isTight ? toNodes(blocks[0].text) : [];
    list.append(h("li", {}, first, (isTight ? blocks.slice(1) : blocks).map(toElement)));
  }
  return list;
}

function drawTable({ head, sides, rows }) {
  const row = (cells, tag) =>
    h("tr", {}, sides.map((side, index) => h(`${tag}.to-${side}`, {}, toNodes(cells[index] ?? ""))));
  const table = h("table", {}, h("thead", {}, row(head, "th")), h("tbody", {}, rows.map((cells) => row(cells, "td"))));
  return h("div.wide", { tabindex: "0", role: "group", "aria-label": "Table" }, table);
}

/** A block of code with its language, or another `title`, and a button that copies it. */
export function codeBlock(language, text, title = language || "text") {
  const button = iconButton("copy", "Copy the code", () => copy(text, "Code copied."));
  const code = h("code", {}, paint(text, language));
  return h(
    "figure.code",
    {},
    h("figcaption", {}, h("span", {}, title), button),
    h("pre", { tabindex: "0", "aria-label": "Code" }, code),
  );
}
