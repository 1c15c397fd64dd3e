// The turns of a conversation, one below the other; with two columns, two replies beside each other.

import { copy } from "../shared/clipboard.js";
import { h, iconButton } from "../shared/dom.js";
import { newReply } from "./answer.js";
import { fileChip } from "./attachments.js";
import { makeEditor, ReplyView } from "./reply.js";

const NEAR_END = 80; // pixels from the end within which the view follows a growing answer

const ACTS = ["again", "remove", "edit", "goOn", "choose", "keep", "sendResults"]; // of replies

/** Draws the conversation that it is shown; `act` has what buttons in it do. */
export class Transcript {
  #act;
  #views = new Map(); // reply -> ReplyView
  #follows = true;

  constructor(act) {
    this.#act = act;
    this.element = h("div.transcript", { role: "log", "aria-live": "off", "aria-label": "Conversation", tabindex: "0" });
    this.element.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.element;
      this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    });
  }

  /** Draw all turns anew; `isBusy` tells whether a reply is being written. */
  show(conversation, isBusy) {
    this.#views.clear();
    const turns = conversation.turns.map((turn) => this.#turn(conversation, turn));
    this.element.replaceChildren(...(turns.length ? turns : [this.#welcome()]));
    for (const [reply, view] of this.#views) view.setBusy(isBusy(reply));
    this.toEnd();
  }

  /** The view of a reply; none if another conversation is shown. */
  view(reply) {
    return this.#views.get(reply);
  }

  /** Go to the end and stay there. */
  toEnd() {
    this.#follows = true;
    this.follow();
  }

  /** Stay at the end, unless the reader has scrolled away from it. */
  follow() {
    if (this.#follows) this.element.scrollTop = this.element.scrollHeight;
  }

  #turn(conversation, turn) {
    const columns = conversation.isSplit ? [0, 1] : [0];
    const replies = columns.map((column) => {
      turn.replies[column] ??= newReply();
      return this.#reply(turn, column, turn.replies[column], conversation.isSplit ? "AB"[column] : "").element;
    });
    return h("section.turn", {}, this.#prompt(turn), h(`div.replies${conversation.isSplit ? ".split" : ""}`, {}, replies));
  }

  #reply(turn, column, reply, name = "") {
    const act = Object.fromEntries(ACTS.map((one) => [one, (...given) => this.#act[one]({ turn, column, reply }, ...given)]));
    const view = new ReplyView(reply, act, (after) => this.#reply(turn, column, after), { name });
    this.#views.set(reply, view);
    return view;
  }

  #prompt(turn) {
    const text = h("div.prompt-text", {}, turn.prompt);
    const edit = () => {
      const editor = makeEditor(turn.prompt, "Message", "Send", (changed) => this.#act.editPrompt(turn, changed), () => {
        text.hidden = false;
      });
      text.hidden = true;
      text.after(editor);
      editor.querySelector("textarea").focus();
    };
    const tools = h(
      "div.tools",
      {},
      iconButton("copy", "Copy the message", () => copy(turn.prompt, "Message copied.")),
      iconButton("edit", "Edit the message and continue from there", edit),
      iconButton("trash", "Delete the message and its answer", () => this.#act.removeTurn(turn)),
    );
    const files = turn.files.length ? h("ul.files", { "aria-label": "Attached files" }, turn.files.map((file) => fileChip(file))) : null;
    return h("article.prompt", { "aria-label": "You" }, files, text, tools);
  }

  #welcome() {
    const tries = [
      "Explain prefill and decode in three sentences.",
      "Write a Python function that reverses a linked list.",
      "Give me a table of four planets with their diameters.",
    ];
    return h(
      "div.welcome",
      {},
      h("h2", {}, "Ask the model"),
      h("p", {}, "It runs on the machine that serves this page. Conversations stay in this browser."),
      h("ul", {}, tries.map((text) => h("li", {}, h("button", { type: "button", onclick: () => this.#act.tryOut(text) }, text)))),
    );
  }
}
