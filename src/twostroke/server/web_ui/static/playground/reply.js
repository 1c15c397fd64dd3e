// One column's reply to a turn: the choice that is shown, its figures, and what can be done with it.

import { draw } from "../markdown/draw.js";
import { copy } from "../shared/clipboard.js";
import { h, iconButton } from "../shared/dom.js";
import { CallsView } from "./calls.js";
import { figuresOf } from "./figures.js";
import { shownOf } from "./request.js";
import { TokenView } from "./tokens.js";

/**
 * Draws a reply, and behind a choice that called tools the reply to their results.
 *
 * `act` has what its buttons do: again, remove, edit, goOn, choose, keep, sendResults, and take where
 * an answer is `isRaw`: a text as it stands, no Markdown. `view(reply)` makes the view of a reply.
 */
export class ReplyView {
  #reply;
  #act;
  #view;
  #isRaw;
  #text;
  #thinking = h("div.markdown");
  #thoughts = h("details.thoughts", { hidden: true }, h("summary", {}, "Reasoning"), this.#thinking);
  #calls;
  #next = h("div.next");
  #nextReply = null;
  #wait = h("p.wait", { hidden: true }, h("span", {}, "Waiting for the first token"));
  #trouble = h("p.trouble", { role: "alert", hidden: true });
  #figures = h("div");
  #tools = h("div.tools");
  #tokens = null;
  #scheduled = 0;

  constructor(reply, act, view, { name = "", isRaw = false } = {}) {
    this.#reply = reply;
    this.#act = act;
    this.#view = view;
    this.#isRaw = isRaw;
    this.#text = h(isRaw ? "div.raw" : "div.markdown");
    this.#calls = new CallsView({ keep: act.keep, send: (results) => act.sendResults(this.choice, results) });
    this.body = h("div.body", {}, this.#thoughts, this.#wait, this.#text, this.#calls.element, this.#trouble);
    const label = h("p.column-name", { "aria-hidden": "true", hidden: name === "" }, name);
    this.element = h("article.reply", { "aria-label": name ? `Answer ${name}` : "Answer" }, label, this.body, this.#figures, this.#tools, this.#next);
    this.isBusy = false;
    this.update();
  }

  setBusy(isBusy) {
    if (this.isBusy === isBusy) return;
    this.isBusy = isBusy;
    this.update();
  }

  get choice() {
    return shownOf(this.#reply);
  }

  /** Draw soon, at most once a frame: for news that come many times a second. */
  later(after = () => {}) {
    this.#scheduled ||= requestAnimationFrame(() => {
      this.#scheduled = 0;
      this.update();
      after();
    });
  }

  /** Draw what the reply is now. */
  update() {
    const { choice } = this;
    this.element.setAttribute("aria-busy", String(this.isBusy));
    this.element.classList.toggle("busy", this.isBusy);
    this.#showNext(choice?.after ?? null);
    if (!choice) {
      this.#tools.replaceChildren(...this.#buttons());
      return;
    }
    this.#wait.hidden = !(this.isBusy && !choice.text && !choice.reasoning && !choice.calls.length && !choice.error);
    this.#showText(choice);
    this.#thoughts.hidden = !choice.reasoning;
    if (choice.reasoning) draw(this.#thinking, choice.reasoning);
    this.#calls.update(choice, this.isBusy);
    this.#trouble.hidden = !choice.error;
    this.#trouble.textContent = choice.error;
    if (this.isBusy) this.#tools.replaceChildren();
    else {
      this.#figures.replaceChildren(...[figuresOf(choice)].filter(Boolean));
      this.#tools.replaceChildren(...this.#buttons());
    }
  }

  #showText(choice) {
    if (choice.tokens?.length) {
      if (!this.#tokens) {
        this.#tokens = new TokenView(choice.text.slice(0, choice.lead), { isRaw: this.#isRaw });
        this.#text.replaceChildren(this.#tokens.element);
      }
      this.#tokens.update(choice.tokens, choice.text);
      return;
    }
    if (this.#tokens) {
      this.#tokens = null;
      this.#text.replaceChildren();
    }
    if (this.#isRaw) this.#text.textContent = choice.text;
    else draw(this.#text, choice.text);
  }

  /** Below a choice whose results were sent stands the reply to them. */
  #showNext(reply) {
    if (reply === this.#nextReply) return;
    this.#nextReply = reply;
    this.#next.replaceChildren(...(reply ? [this.#view(reply).element] : []));
  }

  /** Show another of the choices. */
  #turnTo(place) {
    this.#reply.shown = place;
    this.#tokens = null;
    if (this.#isRaw) this.#text.replaceChildren();
    else draw(this.#text, "");
    this.update();
    this.#act.choose();
  }

  #buttons() {
    const { choice } = this;
    const { choices, shown } = this.#reply;
    const buttons = [];
    if (choices.length > 1) {
      buttons.push(
        iconButton("left", "Previous answer", () => this.#turnTo(shown - 1), { disabled: shown === 0 }),
        h("span.of", {}, `${shown + 1} of ${choices.length}`),
        iconButton("right", "Next answer", () => this.#turnTo(shown + 1), { disabled: shown === choices.length - 1 }),
      );
    }
    if (this.#isRaw && choice?.text) buttons.push(h("button.small", { type: "button", title: "Add this to the text and continue from it", onclick: () => this.#act.take() }, "Take"));
    if (choice?.text) buttons.push(iconButton("copy", "Copy the answer", () => copy(choice.text, "Answer copied.")));
    buttons.push(iconButton("again", choice ? "Regenerate" : "Answer", () => this.#act.again()));
    if (choice?.text) buttons.push(iconButton("edit", "Edit the answer", () => this.#edit()));
    if (["length", "stopped"].includes(choice?.finish) && choice.text && !choice.calls.length) {
      buttons.push(iconButton("onward", "Continue the answer", () => this.#act.goOn()));
    }
    if (choice) buttons.push(iconButton("trash", "Delete the answer", () => this.#act.remove()));
    return buttons;
  }

  #edit() {
    const editor = makeEditor(this.choice.text, "Answer", "Keep", (text) => this.#act.edit(text), () => this.body.hidden = false);
    this.body.hidden = true;
    this.body.after(editor);
    editor.querySelector("textarea").focus();
  }
}

/** A field to change a message in, with its buttons; it removes itself. */
export function makeEditor(text, label, verb, onDone, onLeave) {
  const area = h("textarea", { rows: Math.min(Math.max(text.split("\n").length, 2), 16), "aria-label": label });
  area.value = text;
  const leave = () => {
    editor.remove();
    onLeave();
  };
  const done = () => {
    leave();
    onDone(area.value);
  };
  const editor = h("div.editor", {}, area, h("div.row", {}, h("button.primary", { type: "button", onclick: done }, verb), h("button", { type: "button", onclick: leave }, "Cancel")));
  editor.addEventListener("keydown", (event) => {
    if (event.key === "Escape") {
      event.stopPropagation();
      leave();
    } else if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      done();
    }
  });
  return editor;
}
