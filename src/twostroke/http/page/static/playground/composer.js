// Where a message is written: Enter sends, Shift+Enter breaks the line, Esc stops the answer.

import { h, icon } from "../shared/dom.js";

export class Composer {
  #onSend;
  #onStop;

  constructor(onSend, onStop) {
    this.#onSend = onSend;
    this.#onStop = onStop;
    this.area = h("textarea", { id: "message", rows: "1", placeholder: "Write a message", "aria-label": "Message", "aria-describedby": "message-keys" });
    this.button = h("button.primary.send", { type: "submit" });
    const keys = h("p.keys", { id: "message-keys" }, h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift Enter"), " breaks the line, ", h("kbd", {}, "Esc"), " stops");
    this.element = h("form.composer", { "aria-label": "New message" }, h("div.field", {}, this.area, this.button), keys);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) this.#onStop();
      else this.#send();
    });
    this.area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (!this.isBusy) this.#send();
    });
    this.area.addEventListener("input", () => this.#fit());
    this.setBusy(false);
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.button.setAttribute("aria-label", isBusy ? "Stop" : "Send");
    this.button.title = isBusy ? "Stop (Esc)" : "Send (Enter)";
    this.button.classList.toggle("stop", isBusy);
  }

  put(text) {
    this.area.value = text;
    this.#fit();
    this.area.focus();
  }

  #send() {
    const text = this.area.value;
    if (text.trim() === "") return;
    this.area.value = "";
    this.#fit();
    this.#onSend(text);
  }

  #fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight, 240)}px`;
  }
}
