// The playground: conversations and texts, one column or two, and what one can do with them.

import { notice } from "../shared/notice.js";
import { newChoice, newReply } from "./answer.js";
import { addChoices, Answering, removeChoice } from "./answering.js";
import { Composer } from "./composer.js";
import { showRequest } from "./dialog.js";
import { Frame } from "./frame.js";
import { Panel } from "./panel.js";
import { lastReply, shownOf, toRequest } from "./request.js";
import { Sidebar } from "./sidebar.js";
import { isUntouched } from "./settings.js";
import { newConversation, newTurn, Store } from "./store.js";
import { takeInto } from "./marks.js";
import { TextView } from "./text.js";
import { Transcript } from "./transcript.js";

const KEEP_AFTER_MS = 400; // what is typed is kept when the fingers rest

export class Playground {
  #store = new Store();
  #conversation = newConversation();
  #last = {}; // kind -> the conversation that was open
  #model = null;
  #column = 0; // whose settings are shown
  #answering = new Answering();
  #keeping = 0;

  constructor(place) {
    this.sidebar = new Sidebar(this.#store, {
      open: (conversation) => this.#open(conversation),
      start: () => this.#start(),
      rename: (conversation, name) => this.#rename(conversation, name),
      remove: (conversation) => this.#removeConversation(conversation),
    });
    const replies = {
      again: (goal) => this.#answerOne(goal),
      goOn: (goal) => this.#answerOne(goal, { goesOn: true }),
      remove: (goal) => this.#removeChoice(goal),
      edit: (goal, text) => this.#editChoice(goal, text),
      choose: () => this.#keep(),
      keep: () => this.#keepSoon(),
    };
    this.transcript = new Transcript({
      ...replies,
      sendResults: (goal, choice, results) => this.#sendResults(goal, choice, results),
      editPrompt: (turn, text) => this.#editPrompt(turn, text),
      removeTurn: (turn) => this.#removeTurn(turn),
      tryOut: (text) => {
        this.#send(text);
        this.composer.area.focus(); // the button is gone
      },
    });
    this.text = new TextView({
      ...replies,
      start: (turn) => this.#answer(turn),
      take: (goal) => this.#take(goal),
      undoable: (text, change) => this.#withUndo(text, change),
      stop: () => this.stop(),
    });
    this.composer = new Composer((text, files) => this.#send(text, files), () => this.stop());
    this.panel = new Panel(() => this.#keepSoon());
    this.frame = new Frame(place, this, {
      kind: (kind) => this.#switchTo(kind),
      split: (isSplit) => this.#split(isSplit),
      column: (column) => this.#showColumn(column),
      request: () => this.#showRequest(),
    });
    // Of the whole page: what had the focus may be gone, such as an example that was chosen.
    document.addEventListener("keydown", (event) => {
      const isElsewhere = place.hidden || document.querySelector("dialog[open]") !== null;
      if (event.key === "Escape" && !isElsewhere && this.#answering.isBusy) this.stop();
    });
    window.addEventListener("pagehide", () => this.#leave());
    this.#return();
    this.#show();
  }

  setModel(model) {
    this.#model = model;
  }

  /** Take to heart what the server says that the model can do; null if it does not say. */
  setAbilities(abilities) {
    this.text.setFills(abilities?.completion_fim === true);
    const isNew = this.#conversation.kind === "chat" && !this.#conversation.turns.length;
    if (abilities?.completion_chat === false && isNew) this.#switchTo("text");
  }

  /** Stop every answer that is being written; a message that waits for one is not sent. */
  stop() {
    this.composer.takeBack();
    this.#answering.stop();
  }

  /** Keep what is there before the page is left, and what was open in this tab. */
  #leave() {
    if (this.#answering.isBusy) {
      this.#answering.noteEnd();
      this.#keep();
    } else this.#keepNow();
    this.composer.takeBack();
    remember({ id: this.#conversation.id, kind: this.#conversation.kind, draft: this.composer.area.value });
  }

  /** Open what was open in this tab before the page was loaded again. */
  #return() {
    const { id, kind, draft } = recall();
    const conversation = this.#store.all.find((one) => one.id === id);
    if (conversation) this.#conversation = conversation;
    else if (kind === "text") this.#conversation = newConversation("text");
    if (draft) this.composer.put(draft);
  }

  /** What draws the conversation. */
  get #page() {
    return this.#conversation.kind === "text" ? this.text : this.transcript;
  }

  #show() {
    this.#showTurns();
    this.sidebar.show(this.#conversation);
    this.frame.show(this.#conversation);
    this.#showColumn(this.#conversation.isSplit ? this.#column : 0);
  }

  #showTurns() {
    this.#page.show(this.#conversation, (reply) => this.#answering.has(reply));
  }

  #showColumn(column) {
    this.#column = column;
    this.panel.show(this.#conversation.settings[column], () => this.#model, this.#conversation.kind);
    this.frame.showColumn(column);
  }

  #keep() {
    clearTimeout(this.#keeping);
    this.#keeping = 0;
    this.#store.keep(this.#conversation);
    this.sidebar.show(this.#conversation);
    this.frame.show(this.#conversation);
  }

  #keepSoon() {
    this.#keeping ||= setTimeout(() => this.#keep(), KEEP_AFTER_MS);
  }

  #keepNow() {
    if (this.#keeping) this.#keep();
  }

  #open(conversation) {
    this.stop();
    this.#keepNow();
    this.#last[this.#conversation.kind] = this.#conversation;
    this.#conversation = conversation;
    this.frame.closeSides();
    this.#show();
  }

  /** Begin a new conversation of the same kind with the same settings. */
  #start() {
    const { settings, isSplit, kind } = this.#conversation;
    this.#open(newConversation(kind, settings, isSplit));
    this.#focus();
  }

  /** Go to where one was in the other kind. */
  #switchTo(kind) {
    if (kind === this.#conversation.kind) return;
    this.#open(this.#last[kind] ?? newConversation(kind));
  }

  #focus() {
    (this.#conversation.kind === "text" ? this.text : this.composer).area.focus();
  }

  #split(isSplit) {
    this.stop();
    const conversation = this.#conversation;
    conversation.isSplit = isSplit;
    if (isSplit) {
      const { settings, kind } = conversation;
      if (isUntouched(settings[1], kind)) settings[1] = structuredClone(settings[0]);
      for (const { replies } of conversation.turns) replies[1] ??= structuredClone(replies[0]); // the same past
    }
    this.#keep();
    this.#show();
  }

  #send(text, files = []) {
    const turn = newTurn(text, files);
    this.#conversation.turns.push(turn);
    this.#keep();
    this.#showTurns();
    this.#answer(turn);
  }

  /** Let all columns answer a turn, each with its settings, at the same time. */
  async #answer(turn) {
    const columns = this.#conversation.isSplit ? [0, 1] : [0];
    await Promise.all(columns.map((column) => this.#answerOne({ turn, column, reply: turn.replies[column] })));
  }

  async #answerOne(goal, { goesOn = false } = {}) {
    const conversation = this.#conversation;
    const page = this.#page;
    const view = () => page.view(goal.reply);
    const choice = await this.#answering.answer(conversation, goal, this.#model, {
      goesOn,
      onBegin: () => {
        this.#showBusy();
        view().setBusy(true);
        page.toEnd();
      },
      onNews: () => view()?.later(() => page.follow()),
    });
    if (!choice) return;
    view()?.setBusy(false);
    view()?.update(); // also if it failed before it was busy
    page.follow();
    if (choice.error || choice.finish === "stopped") this.composer.takeBack();
    if (this.#store.has(conversation.id)) this.#store.keep(conversation); // not deleted meanwhile
    if (conversation === this.#conversation) {
      this.sidebar.show(conversation);
      this.frame.announce(spoken(choice, conversation.isSplit ? "AB"[goal.column] : ""));
    }
    this.#showBusy(); // at last: a message that waits is sent now
  }

  #showBusy() {
    this.composer.setBusy(this.#answering.isBusy);
    this.text.setBusy(this.#answering.isBusy);
  }

  /** Go on behind a choice that called tools; with other results than before, it is another choice. */
  #sendResults(goal, choice, results) {
    let target = choice;
    if (choice.after) {
      target = structuredClone({ ...choice, after: null });
      addChoices(goal.reply, [target]);
    }
    target.calls.forEach((call, index) => {
      call.result = results[index];
    });
    target.after = newReply();
    this.#keep();
    this.transcript.view(goal.reply).update();
    this.#answerOne({ ...goal, reply: target.after });
  }

  #removeChoice({ reply }) {
    this.stop();
    this.#withUndo(this.#conversation.kind === "text" ? "Continuation deleted." : "Answer deleted.", () => removeChoice(reply));
  }

  #editChoice({ reply }, text) {
    const { calls } = shownOf(reply);
    const edited = { ...newChoice(), text, calls: structuredClone(calls), isEdited: true, figures: {} };
    addChoices(reply, [{ ...edited, finish: calls.length ? "tool_calls" : "stop" }]);
    this.#keep();
    this.#page.view(reply).update();
  }

  /** Make a column's continuation a part of the text, so that the next one goes on from it. */
  #take({ turn, reply }) {
    this.stop();
    this.#withUndo("Added to the text.", () => {
      takeInto(turn, shownOf(reply));
      turn.replies = [newReply(), newReply()];
    });
  }

  /** Another message in a turn's place: what came after it is another conversation's. */
  #editPrompt(turn, text) {
    this.stop();
    const { turns } = this.#conversation;
    const place = turns.indexOf(turn);
    const later = turns.length - place - 1;
    const change = () => {
      turns.splice(place, turns.length - place, newTurn(text, turn.files));
    };
    if (later) this.#withUndo("Later messages were removed.", change);
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

  #rename(conversation, name) {
    this.#store.rename(conversation, name);
    this.sidebar.show(this.#conversation);
    this.frame.show(this.#conversation);
  }

  #removeConversation(conversation) {
    this.stop();
    this.#store.remove(conversation.id);
    if (conversation.id === this.#conversation.id) {
      clearTimeout(this.#keeping); // or it would come back
      this.#keeping = 0;
      this.#start();
    } else this.sidebar.show(this.#conversation);
    if (this.#last[conversation.kind]?.id === conversation.id) delete this.#last[conversation.kind];
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
    try {
      const [conversation, turn] = this.#nextRequest();
      const { path, body } = toRequest(conversation, turn, this.#column, this.#model, { reply: lastReply(turn, this.#column) });
      showRequest(path, body);
    } catch (error) {
      notice(error.message);
    }
  }

  #nextRequest() {
    const conversation = this.#conversation;
    if (conversation.kind === "text") return [conversation, this.text.nextTurn(this.#column)];
    const typed = this.composer.area.value;
    const turns = [...conversation.turns];
    const files = this.composer.files.all;
    if (typed.trim() || files.length || !turns.length) turns.push(newTurn(typed || (files.length ? "" : "Why is the sky blue?"), files));
    return [{ ...conversation, turns }, turns.at(-1)];
  }
}

const OPEN = "twostroke.open"; // of this tab

/** Keep a value until the tab is closed. */
function remember(value) {
  try {
    sessionStorage.setItem(OPEN, JSON.stringify(value));
  } catch {
    // Storage is forbidden, or full.
  }
}

function recall() {
  try {
    return JSON.parse(sessionStorage.getItem(OPEN)) ?? {};
  } catch {
    return {};
  }
}

function spoken({ text, error, finish, calls }, name) {
  if (error) return `Answer ${name} failed: ${error}`;
  if (finish === "stopped") return `Answer ${name} stopped.`;
  if (calls.length) return `Answer ${name} calls ${calls.map((call) => call.name).join(", ")}. ${text.slice(0, 1000)}`;
  return `Answer ${name}: ${text.slice(0, 1000)}`;
}
