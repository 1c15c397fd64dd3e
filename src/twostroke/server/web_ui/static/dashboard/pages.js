// The map of key-value pages: one cell a page, its colour tells who holds it; shared prefixes stand out.

import { h } from "../shared/dom.js";
import { count, counted, quantity } from "../shared/format.js";
import { colours, prepare } from "./colours.js";

const MOST_HEIGHT = 420;
const CELL = { least: 3, most: 14 };
const KINDS = [
  ["free", "free"],
  ["cached", "cached"],
  ["held", "used by one request"],
  ["shared", "shared"],
];

export class PageMap {
  #canvas = h("canvas.map", { tabindex: "0", role: "application", "aria-label": "Map of pages: the arrow keys go from page to page", "aria-describedby": "pages-summary" });
  #summary = h("p.summary", { id: "pages-summary" });
  #readout = h("p.readout", { role: "status" });
  #counts = KINDS.map(() => h("b"));
  #pages = null;
  #running = [];
  #cells = new Uint8Array();
  #owners = new Uint16Array();
  #grid = { columns: 1, size: CELL.most };
  #chosen = -1; // the cell that is pointed at
  #owner = 0; // whose pages stand out: 1 + index of a running request

  constructor() {
    const keys = KINDS.map(([kind, name], index) => h("li", {}, h(`span.key.page-${kind}`, { "aria-hidden": "true" }), `${name} `, this.#counts[index]));
    this.element = h("section.card", { "aria-label": "KV cache pages" }, h("header", {}, h("h3", {}, "KV cache pages"), h("ul.keys", {}, keys)), this.#canvas, this.#readout, this.#summary);
    this.#canvas.addEventListener("pointermove", (event) => this.#choose(this.#at(event)));
    this.#canvas.addEventListener("pointerleave", () => this.#choose(-1));
    this.#canvas.addEventListener("blur", () => this.#choose(-1));
    this.#canvas.addEventListener("keydown", (event) => this.#walk(event));
  }

  show(pages, running) {
    this.#pages = pages;
    this.#running = running;
    this.#cells = fromBase64(pages.cells);
    const owners = fromBase64(pages.owners);
    this.#owners = new Uint16Array(owners.buffer, 0, owners.length >> 1); // little endian, as all browsers' machines are
    const { free, cached, held, shared } = pages;
    [free, cached, held - shared, shared].forEach((number, index) => {
      this.#counts[index].textContent = count(number);
    });
    this.#summary.textContent =
      `${counted(pages.total, "page")} of ${counted(pages.tokens_per_page, "token")} (${quantity(pages.bytes_per_page, "B")} each): ${count(free)} free, ` +
      `${count(cached)} cached for later prompts, ${count(held)} used by running requests, ${count(shared)} of these shared by several.`;
    this.draw();
  }

  /** Let the pages of one running request stand out; null for none. */
  single(place) {
    this.#owner = place === null ? 0 : place + 1;
    this.draw();
  }

  draw() {
    const width = this.#canvas.clientWidth;
    if (!width || !this.#cells.length) return;
    const number = this.#cells.length;
    const fits = Math.floor(Math.sqrt((width * MOST_HEIGHT) / number));
    const size = Math.min(CELL.most, Math.max(CELL.least, fits));
    const columns = Math.max(1, Math.floor(width / size));
    this.#grid = { columns, size };
    const context = prepare(this.#canvas, width, Math.ceil(number / columns) * size);
    const [free, cached, held, shared, ink] = colours("--page-free", "--page-cached", "--page-held", "--page-shared", "--ink");
    const gap = size > 4 ? 1 : 0.5;
    const owner = this.#chosen >= 0 ? this.#owners[this.#chosen] : this.#owner;
    for (let cell = 0; cell < number; cell += 1) {
      const holders = this.#cells[cell] - 1;
      context.fillStyle = holders < 0 ? free : holders === 0 ? cached : holders === 1 ? held : shared;
      const [x, y] = [(cell % columns) * size, Math.floor(cell / columns) * size];
      context.globalAlpha = owner && this.#owners[cell] !== owner && holders > 0 ? 0.35 : 1;
      context.fillRect(x, y, size - gap, size - gap);
    }
    context.globalAlpha = 1;
    if (this.#chosen >= 0) {
      context.strokeStyle = ink;
      context.lineWidth = 1.5;
      context.strokeRect((this.#chosen % columns) * size - 0.5, Math.floor(this.#chosen / columns) * size - 0.5, size, size);
    }
    this.#tell();
  }

  #tell() {
    const cell = this.#chosen;
    if (cell < 0) {
      this.#readout.textContent = "Point at a page to see which request uses it.";
      return;
    }
    const per = this.#pages.pages_per_cell;
    const which = per > 1 ? `Pages ${count(cell * per)} to ${count(Math.min((cell + 1) * per, this.#pages.total) - 1)}` : `Page ${count(cell)}`;
    const holders = this.#cells[cell] - 1;
    const owner = this.#running[this.#owners[cell] - 1]?.id;
    const window = this.#windowOf(cell);
    const held = owner ? `used by ${holders > 1 ? `${counted(holders, "request")}, first by ${owner}` : owner}` : `used by ${counted(holders, "request")}`;
    this.#readout.textContent = `${which}: ${holders < 0 ? "free" : holders === 0 ? "cached, not used by a request" : held}${window}.`;
  }

  #windowOf(cell) {
    const groups = this.#pages.cell_groups;
    if (!groups) return "";
    const group = this.#pages.groups[fromBase64(groups)[cell] - 1];
    if (!group) return "";
    return group.window ? `, for layers with a window of ${counted(group.window, "token")}` : ", for layers with full attention";
  }

  #at(event) {
    const { columns, size } = this.#grid;
    const column = Math.floor(event.offsetX / size);
    const cell = Math.floor(event.offsetY / size) * columns + column;
    return column < columns && cell < this.#cells.length ? cell : -1;
  }

  #choose(cell) {
    if (cell === this.#chosen) return;
    this.#chosen = cell;
    this.draw();
  }

  #walk(event) {
    const { columns } = this.#grid;
    const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns, ArrowUp: -columns }[event.key];
    if (by === undefined) return;
    event.preventDefault();
    const goal = this.#chosen < 0 ? 0 : this.#chosen + by;
    if (goal >= 0 && goal < this.#cells.length) this.#choose(goal);
  }
}

function fromBase64(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}
