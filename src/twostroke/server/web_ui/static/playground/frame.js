// The playground's frame: list, conversation and settings beside each other, or one over the other.

import { h, icon, iconButton } from "../shared/dom.js";
import { makeTabs } from "../shared/tabs.js";

const WIDE = matchMedia("(min-width: 1100px)"); // as in playground.css

const KINDS = [
  ["chat", "Chat", "Messages, in the model’s chat template"],
  ["text", "Text", "A text that the model continues as it stands"],
];

export class Frame {
  #place;
  #split;
  #columns;
  #kinds;
  #parts;
  #title = h("h2.title");
  #news = h("p.unseen", { role: "status", "aria-live": "polite" });
  #sides = [];

  /** `parts` has the sidebar, transcript, composer, text and panel; `act` has kind, split, column, request. */
  constructor(place, parts, act) {
    this.#place = place;
    this.#parts = parts;
    this.#split = h("button.with-words", { type: "button", "aria-pressed": "false", title: "Send the same messages with two settings", onclick: () => act.split(this.#split.getAttribute("aria-pressed") !== "true") }, icon("columns"), h("span", {}, "Side by side"));
    this.#columns = h("div.tabs.columns", { role: "tablist", "aria-label": "Settings of", hidden: true }, ["A", "B"].map((name, column) =>
      h("button", { type: "button", role: "tab", id: `column-${name}`, "aria-controls": "column-settings", "aria-selected": String(column === 0), tabindex: column ? "-1" : "0" }, name)));
    makeTabs(this.#columns, (tab) => act.column(tab.id === "column-A" ? 0 : 1));
    const settings = h("div", { id: "column-settings", role: "tabpanel", "aria-label": "Settings of the column" }, parts.panel.element);
    const aside = h("aside.settings", { id: "settings", "aria-label": "Settings" }, h("header", {}, h("h2", {}, "Settings"), this.#columns, this.#closer()), settings);
    parts.sidebar.element.firstChild.append(this.#closer());
    const code = h("button.with-words", { type: "button", title: "This request as curl or Python", onclick: act.request }, icon("code"), h("span", {}, "Code"));
    this.#kinds = h("div.kinds", { role: "group", "aria-label": "The model’s input" }, KINDS.map(([kind, word, title]) =>
      h("button", { type: "button", "aria-pressed": "false", "data-kind": kind, title, onclick: () => act.kind(kind) }, word)));
    const tools = h("div.head", {}, this.#side("menu", "Conversations", parts.sidebar.element), this.#kinds, this.#title, this.#split, code, this.#side("sliders", "Settings", aside));
    const middle = h("div.middle", {}, tools, parts.transcript.element, parts.composer.element, parts.text.element, this.#news);
    const shade = h("div.shade", { onclick: () => this.closeSides() });
    place.append(parts.sidebar.element, middle, aside, shade);
    place.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.closeSides()) event.stopPropagation();
    }, { capture: true });
    WIDE.addEventListener("change", () => this.closeSides());
  }

  show(conversation) {
    const isText = conversation.kind === "text";
    this.#title.textContent = conversation.title || (isText ? "New text" : "New chat");
    for (const button of this.#kinds.children) button.setAttribute("aria-pressed", String(button.dataset.kind === conversation.kind));
    this.#parts.transcript.element.hidden = isText;
    this.#parts.composer.element.hidden = isText;
    this.#parts.text.element.hidden = !isText;
    this.#split.setAttribute("aria-pressed", String(conversation.isSplit));
    this.#columns.hidden = !conversation.isSplit;
    this.#place.classList.toggle("is-split", conversation.isSplit);
  }

  showColumn(column) {
    [...this.#columns.children].forEach((tab, index) => {
      tab.setAttribute("aria-selected", String(index === column));
      tab.tabIndex = index === column ? 0 : -1;
    });
  }

  /** Have a screen reader say something when it is free. */
  announce(text) {
    this.#news.textContent = text;
  }

  /** Close what lies over the conversation; return whether anything did. */
  closeSides() {
    const open = this.#sides.filter(({ side }) => "open" in side.dataset);
    for (const { side, button } of open) {
      delete side.dataset.open;
      button.setAttribute("aria-expanded", "false");
      if (side.contains(document.activeElement)) button.focus();
    }
    return open.length > 0;
  }

  #closer() {
    return iconButton("close", "Close", () => this.closeSides(), { class: "icon side-button" });
  }

  #side(drawing, label, side) {
    const toggle = () => {
      const isOpen = "open" in side.dataset;
      this.closeSides();
      if (isOpen) return;
      side.dataset.open = "";
      button.setAttribute("aria-expanded", "true");
      side.querySelector("button, input, textarea")?.focus();
    };
    const button = iconButton(drawing, label, toggle, { "aria-controls": side.id, "aria-expanded": "false", class: "icon side-button" });
    this.#sides.push({ side, button });
    return button;
  }
}
