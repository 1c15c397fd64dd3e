// Text files that go along with a message: chosen, dropped or pasted, and bounded in size.

import { h, iconButton } from "../shared/dom.js";
import { notice } from "../shared/notice.js";

const MAX_FILES = 20;
const MAX_CHARACTERS = 400_000; // of all files of a message

export class Attachments {
  all = []; // {name, text}

  constructor() {
    this.chooser = h("input.unseen", { type: "file", multiple: true, tabindex: "-1", "aria-hidden": "true" });
    this.button = iconButton("clip", "Attach text files", () => this.chooser.click());
    this.element = h("ul.files", { "aria-label": "Attached files", hidden: true });
    this.chooser.addEventListener("change", () => {
      this.#read([...this.chooser.files]);
      this.chooser.value = "";
    });
  }

  /** Let files be dropped on an element. */
  takeDropsOn(element) {
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    element.addEventListener("dragover", (event) => {
      if (hasFiles(event)) event.preventDefault();
    });
    element.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.#read([...event.dataTransfer.files]);
    });
  }

  /** Take files that are pasted; other things are left to the field. */
  takePaste(event) {
    const files = [...(event.clipboardData?.files ?? [])];
    if (!files.length) return;
    event.preventDefault();
    this.#read(files);
  }

  add(files) {
    this.all = [...this.all, ...files];
    this.#show();
  }

  /** Return the files, and forget them. */
  take() {
    const files = this.all;
    this.all = [];
    this.#show();
    return files;
  }

  async #read(files) {
    for (const file of files) {
      try {
        this.add([await readText(file, this.all)]);
      } catch (error) {
        notice(error.message);
      }
    }
  }

  #show() {
    this.element.hidden = !this.all.length;
    this.element.replaceChildren(...this.all.map((file) => fileChip(file, () => {
      this.all = this.all.filter((one) => one !== file);
      this.#show();
    })));
  }
}

/** Return a file's name and size as a list item; `onRemove` adds a button. */
export function fileChip({ name, text }, onRemove = null) {
  const remove = onRemove && iconButton("close", `Remove ${name}`, onRemove);
  return h("li.file", {}, h("span", {}, name), h("small", {}, sizeOf(text.length)), remove);
}

/** Return a message's text with its files in it, as the model reads them. */
export function withFiles(prompt, files) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([ticks]) => ticks.length));
    const fence = "`".repeat(longest + 1);
    return `${name}:\n${fence}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, prompt].filter(Boolean).join("\n\n");
}

/** Read a file; throws an Error with a sentence for the user. */
async function readText(file, others) {
  const taken = others.reduce((sum, { text }) => sum + text.length, 0);
  if (others.length >= MAX_FILES) throw new Error(`A message has at most ${MAX_FILES} files.`);
  if (taken + file.size > 4 * MAX_CHARACTERS) throw new Error(tooLong(file.name));
  let text;
  try {
    text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
  } catch {
    throw new Error(`${file.name} is not a text file.`);
  }
  if (text.includes("\0")) throw new Error(`${file.name} is not a text file.`);
  if (taken + text.length > MAX_CHARACTERS) throw new Error(tooLong(file.name));
  return { name: file.name, text };
}

function tooLong(name) {
  return `${name} is too long: the files of a message have at most ${MAX_CHARACTERS.toLocaleString("en")} characters.`;
}

function sizeOf(length) {
  return length < 1000 ? `${length} characters` : `${Math.round(length / 1000).toLocaleString("en")}k characters`;
}
