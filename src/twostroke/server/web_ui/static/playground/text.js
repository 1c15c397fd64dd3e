// A text that the model continues where it stands: one field, or with two columns one continuation beside the other.

import { copy } from "../shared/clipboard.js";
import { h, icon, iconButton } from "../shared/dom.js";
import { newReply } from "./answer.js";
import { figuresOf } from "./figures.js";
import { editText, takeBack, takeInto } from "./marks.js";
import { Pad } from "./pad.js";
import { legend } from "./pieces.js";
import { ReplyView } from "./reply.js";
import { shownOf } from "./request.js";

const NEAR_END = 80; // pixels from the end within which the view follows a growing text
const ACTS = ["again", "remove", "edit", "goOn", "choose", "keep", "take"]; // of replies
const TRIES = [
  { prompt: "Once upon a time, in a harbour town, there was a cat who" },
  { prompt: "Three reasons to read the manual first:\n\n1." },
];
const GAP = { prompt: "def is_prime(n: int) -> bool:\n    ", suffix: "\n\nprint(is_prime(17))\n" };

/** Draws the text that it is shown; `act` has what its buttons do. */
export class TextView {
  #act;
  #turn = null;
  #isSplit = false;
  #fills = false;
  #views = new Map(); // reply -> what draws it
  #follows = true;
  #pad;
  #suffix;
  #gap;
  #legend = legend();
  #tries = h("div.tries");
  #trouble = h("p.trouble", { role: "alert", hidden: true });
  #replies = h("div.replies.split");
  #figures = h("div.text-figures");
  #tools = h("div.tools");
  #button = h("button.primary.continue", { type: "button" });
  #scheduled = 0;

  constructor(act) {
    this.#act = act;
    this.#pad = new Pad("text", "Text", (value, caret) => this.#edit(value, caret));
    this.#suffix = h("textarea", { id: "suffix", rows: "3", spellcheck: "false", placeholder: "The model fills the gap before this" });
    this.#gap = h("div.gap", {}, h("label", { for: "suffix" }, "Text after the gap"), this.#suffix);
    this.area.placeholder = "Begin a text. The model continues it as it stands, without a chat template.";
    this.#suffix.addEventListener("input", () => {
      this.#turn.suffix = this.#suffix.value;
      this.#fit();
      this.#act.keep();
    });
    this.#button.addEventListener("click", () => this.#press());
    const sheet = h("div.sheet", {}, this.#legend, this.#pad.element, this.#gap, this.#tries, this.#trouble, this.#replies);
    this.scroller = h("div.transcript", {}, sheet);
    this.scroller.addEventListener("scroll", () => {
      const { scrollHeight, scrollTop, clientHeight } = this.scroller;
      this.#follows = scrollHeight - scrollTop - clientHeight < NEAR_END;
    });
    const keys = h("p.keys", {}, h("kbd", {}, "Ctrl Enter"), " continues, ", h("kbd", {}, "Esc"), " stops");
    const foot = h("div.text-foot", {}, this.#figures, h("div.row", {}, this.#tools, keys, this.#button));
    this.element = h("section.text", { "aria-label": "Text", hidden: true }, this.scroller, foot);
    this.element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey) || event.isComposing) return;
      event.preventDefault();
      if (!this.isBusy) this.#press();
    });
    this.setBusy(false);
  }

  /** Where the text is written. */
  get area() {
    return this.#pad.area;
  }

  /** Say whether the model has tokens for filling in the middle. */
  setFills(fills) {
    this.#fills = fills;
    if (this.#turn) this.#showAround();
  }

  /** Draw a conversation's text anew; `isBusy` tells whether a reply is being written. */
  show(conversation, isBusy) {
    [this.#turn] = conversation.turns;
    this.#isSplit = conversation.isSplit;
    this.#views.clear();
    const { replies } = this.#turn;
    const columns = this.#isSplit ? [0, 1] : [0];
    for (const column of columns) replies[column] ??= newReply();
    this.#replies.replaceChildren(...(this.#isSplit ? columns.map((column) => this.#column(column)) : []));
    if (!this.#isSplit) this.#views.set(replies[0], this);
    this.#draw();
    for (const [reply, view] of this.#views) view.setBusy(isBusy(reply));
    this.#suffix.value = this.#turn.suffix;
    this.#fit();
    this.toEnd();
  }

  /** What draws a reply; none if another conversation is shown. */
  view(reply) {
    return this.#views.get(reply);
  }

  setBusy(isBusy) {
    this.isBusy = isBusy;
    this.area.readOnly = isBusy;
    this.#suffix.readOnly = isBusy;
    this.element.classList.toggle("writing", isBusy);
    this.#button.replaceChildren(icon(isBusy ? "stop" : "onward"), h("span", {}, isBusy ? "Stop" : this.#isGap ? "Fill the gap" : "Continue"));
    this.#button.classList.toggle("stop", isBusy);
    if (this.#turn) this.#showTools();
  }

  /** Draw soon, at most once a frame: for news that come many times a second. */
  later(after = () => {}) {
    this.#scheduled ||= requestAnimationFrame(() => {
      this.#scheduled = 0;
      this.#grow();
      after();
    });
  }

  /** Draw what the continuation is now. */
  update() {
    this.#draw();
    this.setBusy(this.isBusy);
  }

  toEnd() {
    this.#follows = true;
    this.follow();
  }

  follow() {
    if (this.#follows && !this.#turn.suffix) this.scroller.scrollTop = this.scroller.scrollHeight;
  }

  /** The turn that the next request is made of. */
  nextTurn(column) {
    const { prompt, suffix, replies } = this.#turn;
    const begun = this.#isSplit ? "" : (shownOf(replies[column])?.text ?? "");
    return { prompt: prompt + begun, suffix, replies: [] };
  }

  /** What stands in place: with two columns neither's. */
  get #choice() {
    return this.#isSplit ? null : shownOf(this.#turn.replies[0]);
  }

  get #isGap() {
    return Boolean(this.#turn?.suffix);
  }

  #column(column) {
    const goal = { turn: this.#turn, column, reply: this.#turn.replies[column] };
    const act = Object.fromEntries(ACTS.map((one) => [one, (...given) => this.#act[one](goal, ...given)]));
    const view = new ReplyView(goal.reply, act, null, { name: "AB"[column], isRaw: true });
    this.#views.set(goal.reply, view);
    return view.element;
  }

  #draw() {
    this.#pad.show(this.#turn, this.#choice);
    this.#showAround();
  }

  #grow() {
    this.#pad.grow(this.#choice);
    this.#showAround();
  }

  /** Draw what stands around the text. */
  #showAround() {
    const { prompt, suffix } = this.#turn;
    const choice = this.#choice;
    this.#legend.hidden = !this.#pad.hasShades;
    this.#gap.hidden = !this.#fills && suffix === "";
    this.#trouble.hidden = !choice?.error;
    this.#trouble.textContent = choice?.error ?? "";
    const isNew = !prompt && !suffix && !choice?.text;
    this.#tries.hidden = !isNew;
    const tries = this.#fills ? [...TRIES, GAP] : TRIES;
    if (isNew) this.#tries.replaceChildren(...tries.map((one) => h("button.small", { type: "button", onclick: () => this.#tryOut(one) }, one.prompt.split("\n")[0])));
    this.#showTools();
  }

  #tryOut({ prompt, suffix = "" }) {
    Object.assign(this.#turn, { prompt, suffix });
    this.#suffix.value = suffix;
    this.#fit();
    this.#draw();
    this.#act.keep();
    this.#press();
  }

  /** Continue, or stop. What stands in place becomes a part of the text first. */
  #press() {
    if (this.isBusy) {
      this.#act.stop();
      return;
    }
    const turn = this.#turn;
    if (this.#choice?.text) {
      takeInto(turn, this.#choice);
      turn.replies = [newReply()];
      this.#views.clear();
      this.#views.set(turn.replies[0], this);
    }
    this.#draw();
    this.#act.start(turn);
  }

  #edit(value, caret) {
    const turn = this.#turn;
    if (!editText(turn, this.#choice, value, caret)) {
      turn.replies = [newReply()];
      this.#views.clear();
      this.#views.set(turn.replies[0], this);
    }
    this.#draw();
    this.#act.keep();
  }

  #showTools() {
    const choice = this.#choice;
    const figures = choice && !this.isBusy ? figuresOf(choice) : null;
    this.#figures.replaceChildren(...[figures].filter(Boolean));
    this.#tools.replaceChildren(...(this.isBusy ? [] : this.#buttons(choice)));
  }

  #buttons(choice) {
    const [reply] = this.#turn.replies;
    const goal = { turn: this.#turn, column: 0, reply };
    const { prompt, marks } = this.#turn;
    const buttons = [];
    if (!this.#isSplit && reply.choices.length > 1) {
      buttons.push(
        iconButton("left", "Previous continuation", () => this.#turnTo(-1), { disabled: reply.shown === 0 }),
        h("span.of", {}, `${reply.shown + 1} of ${reply.choices.length}`),
        iconButton("right", "Next continuation", () => this.#turnTo(1), { disabled: reply.shown === reply.choices.length - 1 }),
      );
    }
    if (choice) buttons.push(iconButton("again", "Regenerate", () => this.#act.again(goal)));
    if (this.area.value) buttons.push(iconButton("copy", "Copy the text", () => copy(this.area.value, "Text copied.")));
    if (choice) buttons.push(iconButton("trash", "Delete the continuation", () => this.#act.remove(goal)));
    else if (prompt && marks.at(-1)?.end === prompt.length) {
      buttons.push(iconButton("trash", "Remove the model’s last text", () => this.#act.undoable("Removed.", () => takeBack(this.#turn))));
    }
    return buttons;
  }

  #turnTo(step) {
    this.#turn.replies[0].shown += step;
    this.#draw();
    this.#act.choose();
  }

  #fit() {
    this.#suffix.style.height = "auto";
    if (this.#suffix.scrollHeight) this.#suffix.style.height = `${this.#suffix.scrollHeight + 2}px`;
    this.setBusy(this.isBusy);
  }
}
