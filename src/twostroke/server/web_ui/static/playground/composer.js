// Where a message is written: Enter sends, Shift+Enter breaks the line, Esc stops the answer.

import { h, icon, iconButton } from "../shared/dom.js";
import { Attachments } from "./attachments.js";

export class Composer {
  #onSend;
  #onStop;
  #queued = null; // a message that is sent after the answer

  /** `onSend` gets a text and its files. */
  constructor(onSend, onStop) {
    this.#onSend = onSend;
    this.#onStop = onStop;
    this.area = h("textarea", { id: "message", rows: "1", placeholder: "Write a message", "aria-label": "Message", "aria-describedby": "message-keys" });
    this.button = h("button.primary.send", { type: "submit" });
    this.files = new Attachments();
    this.waiting = h("div.waiting", { role: "status", hidden: true });
    const keys = h("p.keys", { id: "message-keys" }, h("kbd", {}, "Enter"), " sends, ", h("kbd", {}, "Shift Enter"), " breaks the line, ", h("kbd", {}, "Esc"), " stops");
    const field = h("div.field", {}, this.files.button, this.area, this.button);
    this.element = h("form.composer", { "aria-label": "New message" }, this.waiting, this.files.element, this.files.chooser, field, keys);
    this.files.takeDropsOn(this.element);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.isBusy) this.#onStop();
      else this.#send();
    });
    this.area.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      if (this.isBusy) this.#queue();
      else this.#send();
    });
    this.area.addEventListener("paste", (event) => this.files.takePaste(event));
    this.area.addEventListener("input", () => this.#fit());
    this.setBusy(false);
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.button.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.button.setAttribute("aria-label", isBusy ? "Stop" : "Send");
    this.button.title = isBusy ? "Stop (Esc)" : "Send (Enter)";
    this.button.classList.toggle("stop", isBusy);
    if (isBusy || !this.#queued) return;
    const { text, files } = this.#queued;
    this.#setQueued(null);
    this.#onSend(text, files);
  }

  put(text) {
    this.area.value = text;
    this.#fit();
    this.area.focus();
  }

  /** Do not send a message that waits for an answer's end: it is to be edited again. */
  takeBack() {
    if (!this.#queued) return;
    const { text, files } = this.#queued;
    this.#setQueued(null);
    this.area.value = [text, this.area.value].filter(Boolean).join("\n");
    this.files.add(files);
    this.#fit();
  }

  #send() {
    const message = this.#take();
    if (message) this.#onSend(message.text, message.files);
  }

  /** Send the message once the answer that is being written has ended. */
  #queue() {
    const message = this.#take();
    if (!message) return;
    const { text = "", files = [] } = this.#queued ?? {};
    this.#setQueued({ text: [text, message.text].filter(Boolean).join("\n"), files: [...files, ...message.files] });
  }

  /** Empty the field; return what was in it, or null without any. */
  #take() {
    const text = this.area.value;
    if (text.trim() === "" && !this.files.all.length) return null;
    const files = this.files.take();
    this.area.value = "";
    this.#fit();
    return { text, files };
  }

  #setQueued(message) {
    this.#queued = message;
    this.waiting.hidden = !message;
    const edit = () => {
      this.takeBack();
      this.area.focus();
    };
    const words = message?.text || message?.files.map((file) => file.name).join(", ");
    this.waiting.replaceChildren(...(message ? [h("span", {}, "Sent after this answer: ", h("q", {}, words)), iconButton("close", "Do not send it", edit)] : []));
  }

  #fit() {
    this.area.style.height = "auto";
    this.area.style.height = `${Math.min(this.area.scrollHeight, 240)}px`;
  }
}
