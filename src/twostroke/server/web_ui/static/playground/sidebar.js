// The list of kept conversations, and moving them in and out as a file.

import { h, icon } from "../shared/dom.js";
import { notice } from "../shared/notice.js";
import { exportAll, importAll } from "./store.js";

export class Sidebar {
  #store;
  #act;
  #list = h("ul.conversations");
  #new = h("span", {}, "New chat");
  #search = h("input", { type: "search", placeholder: "Search", "aria-label": "Search conversations" });
  #current = null;
  #file = h("input.unseen", { type: "file", accept: ".json,application/json", tabindex: "-1", "aria-hidden": "true" });

  /** `act` has `open(conversation)`, `start()`, `rename(conversation, name)` and `remove(conversation)`. */
  constructor(store, act) {
    this.#store = store;
    this.#act = act;
    const start = h("button.primary", { type: "button", onclick: () => act.start() }, icon("plus"), this.#new);
    const take = h("button.plain", { type: "button", onclick: () => this.#file.click() }, "Import");
    const give = h("button.plain", { type: "button", onclick: () => this.#export() }, "Export");
    this.#file.addEventListener("change", () => this.#import());
    this.#search.addEventListener("input", () => this.show(this.#current));
    this.element = h("nav.sidebar", { id: "conversations", "aria-label": "Conversations" }, h("header", {}, start), this.#search, this.#list, h("div.row", {}, take, give, this.#file));
  }

  show(current) {
    this.#current = current;
    const isText = current.kind === "text";
    this.#new.textContent = isText ? "New text" : "New chat";
    const items = this.#store.find(this.#search.value).map((conversation) => {
      const isHere = conversation.id === current.id;
      const title = conversation.title || "Untitled";
      const open = h("button.open", { type: "button", "aria-current": isHere ? "true" : null, onclick: () => this.#act.open(conversation) }, conversation.kind === "text" ? icon("text") : null, h("span", {}, title));
      const remove = h("button.icon", { type: "button", "aria-label": `Delete “${title}”`, title: "Delete", onclick: () => this.#act.remove(conversation) }, icon("trash"));
      const item = h("li", {}, open, h("div.acts", {}, h("button.icon", { type: "button", "aria-label": `Rename “${title}”`, title: "Rename", onclick: () => this.#rename(item, conversation) }, icon("edit")), remove));
      return item;
    });
    const none = this.#search.value.trim() ? "No matches." : isText ? "No texts yet." : "No chats yet.";
    this.#list.replaceChildren(...(items.length ? items : [h("li.none", {}, none)]));
  }

  /** Let the user write another name: Enter and leaving the field keep it, Esc does not. */
  #rename(item, conversation) {
    const field = h("input", { type: "text", maxlength: "80", "aria-label": "Name of the conversation" });
    field.value = conversation.title;
    let isOver = false;
    const end = (isKept) => {
      if (isOver) return;
      isOver = true;
      if (isKept) this.#act.rename(conversation, field.value);
      else this.show(this.#current);
      this.#list.querySelector("[aria-current=true]")?.focus();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== "Escape") return;
      event.stopPropagation();
      if (event.key === "Enter" && event.isComposing) return;
      end(event.key === "Enter");
    });
    field.addEventListener("blur", () => end(true));
    item.replaceChildren(field);
    field.focus();
    field.select();
  }

  #export() {
    if (!this.#store.all.length) {
      notice("There is nothing to export yet.");
      return;
    }
    const url = URL.createObjectURL(new Blob([exportAll(this.#store.all)], { type: "application/json" }));
    h("a", { href: url, download: "twostroke-conversations.json" }).click();
    setTimeout(() => URL.revokeObjectURL(url), 10_000);
  }

  async #import() {
    const [file] = this.#file.files;
    this.#file.value = "";
    if (!file) return;
    try {
      const taken = importAll(await file.text());
      this.#store.add(taken);
      notice(taken.length === 1 ? "One conversation was imported." : `${taken.length} conversations were imported.`);
      if (taken.length) this.#act.open(taken[0]);
    } catch (error) {
      notice(error.message);
    }
  }
}
