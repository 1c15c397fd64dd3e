// The playground: conversations with the model, one column or two, and what one can do with them.

import { notice } from "../shared/notice.js";
import { collect, newChoice } from "./answer.js";
import { Composer } from "./composer.js";
import { showRequest } from "./dialog.js";
import { judgeAnswer } from "./form.js";
import { Frame } from "./frame.js";
import { Panel } from "./panel.js";
import { PATH, shownChoice, toBody } from "./request.js";
import { Sidebar } from "./sidebar.js";
import { isUntouched } from "./settings.js";
import { newConversation, newId, Store } from "./store.js";
import { Transcript } from "./transcript.js";

const MAX_CHOICES = 8;

export class Playground {
  #store = new Store();
  #conversation = newConversation();
  #model = null;
  #column = 0; // whose settings are shown
  #running = new Map(); // "turn's id/column" -> AbortController

  constructor(place) {
    this.sidebar = new Sidebar(this.#store, {
      open: (conversation) => this.#open(conversation),
      start: () => this.#start(),
      remove: (conversation) => this.#removeConversation(conversation),
    });
    this.transcript = new Transcript({
      again: (turn, column) => this.#answer(turn, [column]),
      goOn: (turn, column) => this.#answer(turn, [column], { goesOn: true }),
      remove: (turn, column) => this.#removeChoice(turn, column),
      edit: (turn, column, text) => this.#editChoice(turn, column, text),
      choose: () => this.#keep(),
      editPrompt: (turn, text) => this.#editPrompt(turn, text),
      removeTurn: (turn) => this.#removeTurn(turn),
      tryOut: (text) => this.#send(text),
    });
    this.composer = new Composer((text) => this.#send(text), () => this.stop());
    this.panel = new Panel(() => this.#keep());
    this.frame = new Frame(place, this, {
      split: (isSplit) => this.#split(isSplit),
      column: (column) => this.#showColumn(column),
      request: () => this.#showRequest(),
    });
    place.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.#running.size) this.stop();
    });
    this.#show();
  }

  setModel(model) {
    this.#model = model;
  }

  /** Stop every answer that is being written. */
  stop() {
    for (const controller of this.#running.values()) controller.abort();
  }

  #show() {
    this.#showTurns();
    this.sidebar.show(this.#conversation);
    this.frame.show(this.#conversation);
    this.#showColumn(this.#conversation.isSplit ? this.#column : 0);
  }

  #showTurns() {
    this.transcript.show(this.#conversation, (key) => this.#running.has(key));
  }

  #showColumn(column) {
    this.#column = column;
    this.panel.show(this.#conversation.settings[column], () => this.#model);
    this.frame.showColumn(column);
  }

  #keep() {
    this.#store.keep(this.#conversation);
    this.sidebar.show(this.#conversation);
    this.frame.show(this.#conversation);
  }

  #open(conversation) {
    this.stop();
    this.#conversation = conversation;
    this.frame.closeSides();
    this.#show();
  }

  /** Begin a new conversation with the same settings. */
  #start() {
    this.#open(newConversation(this.#conversation.settings, this.#conversation.isSplit));
    this.composer.area.focus();
  }

  #split(isSplit) {
    this.stop();
    const conversation = this.#conversation;
    conversation.isSplit = isSplit;
    if (isSplit) {
      const { settings } = conversation;
      if (isUntouched(settings[1])) settings[1] = structuredClone(settings[0]);
      for (const { replies } of conversation.turns) replies[1] ??= structuredClone(replies[0]); // the same past
    }
    this.#keep();
    this.#show();
  }

  #send(text) {
    const turn = { id: newId(), prompt: text, replies: [] };
    this.#conversation.turns.push(turn);
    this.#keep();
    this.#showTurns();
    this.#answer(turn);
  }

  /** Let columns answer a turn, each with its settings, at the same time. */
  async #answer(turn, columns = this.#conversation.isSplit ? [0, 1] : [0], { goesOn = false } = {}) {
    await Promise.all(columns.map((column) => this.#answerIn(turn, column, goesOn)));
    this.composer.setBusy(this.#running.size > 0);
  }

  async #answerIn(turn, column, goesOn) {
    const key = `${turn.id}/${column}`;
    if (this.#running.has(key)) return;
    const conversation = this.#conversation;
    const view = () => this.transcript.view(key);
    const reply = turn.replies[column];
    const begun = goesOn ? shownChoice(turn, column).text : "";
    let body;
    try {
      body = toBody(conversation, column, conversation.turns.indexOf(turn), this.#model, begun);
    } catch (error) {
      this.#addChoices(reply, [{ ...newChoice(begun), error: error.message }]);
      view().update();
      return;
    }
    const choices = Array.from({ length: Math.max(1, Math.min(body.n ?? 1, MAX_CHOICES)) }, () => newChoice(begun));
    this.#addChoices(reply, choices);
    const controller = new AbortController();
    this.#running.set(key, controller);
    this.composer.setBusy(true);
    view().setBusy(true);
    this.transcript.toEnd();
    await collect(body, choices, controller.signal, () => view()?.later(() => this.transcript.follow()));
    this.#running.delete(key);
    for (const choice of choices) choice.figures.form = judgeAnswer(conversation.settings[column], choice);
    if (choices.every((choice) => choice.error && choice.text === begun)) this.#dropChoices(reply, choices.slice(1));
    view()?.setBusy(false);
    this.transcript.follow();
    this.#afterwards(conversation, choices[0], column);
  }

  #afterwards(conversation, choice, column) {
    if (this.#store.has(conversation.id)) this.#store.keep(conversation); // not deleted meanwhile
    if (conversation !== this.#conversation) return;
    this.sidebar.show(conversation);
    this.frame.announce(spoken(choice, conversation.isSplit ? "AB"[column] : ""));
  }

  /** Put choices behind the others and show the first of them; failed ones make room. */
  #addChoices(reply, choices) {
    reply.choices = reply.choices.filter((choice) => choice.text || choice.calls.length || choice.reasoning);
    reply.shown = reply.choices.length;
    reply.choices.push(...choices);
  }

  /** Leave one of several that have failed alike. */
  #dropChoices(reply, choices) {
    reply.choices = reply.choices.filter((choice) => !choices.includes(choice));
    reply.shown = Math.min(reply.shown, reply.choices.length - 1);
  }

  #removeChoice(turn, column) {
    this.stop();
    this.#withUndo("Answer deleted.", () => {
      const reply = turn.replies[column];
      reply.choices.splice(reply.shown, 1);
      reply.shown = Math.max(0, Math.min(reply.shown, reply.choices.length - 1));
    });
  }

  #editChoice(turn, column, text) {
    const reply = turn.replies[column];
    this.#addChoices(reply, [{ ...newChoice(text), isEdited: true, finish: "stop", figures: {} }]);
    this.#keep();
    this.transcript.view(`${turn.id}/${column}`).update();
  }

  /** Another message in a turn's place: what came after it is another conversation's. */
  #editPrompt(turn, text) {
    this.stop();
    const { turns } = this.#conversation;
    const place = turns.indexOf(turn);
    const later = turns.length - place - 1;
    const change = () => {
      turns.splice(place, turns.length - place, { id: newId(), prompt: text, replies: [] });
    };
    if (later) this.#withUndo("What came after the message was removed.", change);
    else change();
    this.#keep();
    this.#showTurns();
    this.#answer(turns[place]);
  }

  #removeTurn(turn) {
    this.stop();
    this.#withUndo("Message deleted.", () => {
      const { turns } = this.#conversation;
      turns.splice(turns.indexOf(turn), 1);
    });
  }

  #removeConversation(conversation) {
    this.stop();
    this.#store.remove(conversation.id);
    if (conversation.id === this.#conversation.id) this.#start();
    else this.sidebar.show(this.#conversation);
    const restore = () => {
      this.#store.add([conversation]);
      this.#open(conversation);
    };
    notice("Conversation deleted.", { label: "Undo", run: restore });
  }

  #withUndo(text, change) {
    const conversation = this.#conversation;
    const before = structuredClone(conversation.turns);
    change();
    this.#keep();
    this.#show();
    const restore = () => {
      this.stop();
      conversation.turns = before;
      this.#open(conversation);
      this.#keep();
    };
    notice(text, { label: "Undo", run: restore });
  }

  /** Show the request that would be sent, or the one behind the last answer. */
  #showRequest() {
    const typed = this.composer.area.value;
    const turns = [...this.#conversation.turns];
    if (typed.trim() || !turns.length) turns.push({ prompt: typed || "Why is the sky blue?", replies: [] });
    try {
      const body = toBody({ ...this.#conversation, turns }, this.#column, turns.length - 1, this.#model);
      showRequest(PATH, body);
    } catch (error) {
      notice(error.message);
    }
  }
}

function spoken({ text, error, finish }, name) {
  if (error) return `Answer ${name} failed: ${error}`;
  if (finish === "stopped") return `Answer ${name} stopped.`;
  return `Answer ${name}: ${text.slice(0, 1000)}`;
}
