// Has replies written, each with its column's settings: who is writing now, and how to stop it.

import { collect, newChoice } from "./answer.js";
import { judgeAnswer } from "./form.js";
import { shownOf, toRequest } from "./request.js";

const MAX_CHOICES = 8;

export class Answering {
  #running = new Map(); // reply -> AbortController

  get isBusy() {
    return this.#running.size > 0;
  }

  has(reply) {
    return this.#running.has(reply);
  }

  /** Note in answers that are being written that they end here: the page is left. */
  noteEnd() {
    for (const reply of this.#running.keys()) {
      const choice = shownOf(reply);
      if (choice && !choice.finish) choice.finish = "stopped";
    }
  }

  /** Stop every answer that is being written. */
  stop() {
    for (const controller of this.#running.values()) controller.abort();
  }

  /**
   * Write new choices into a reply, or go on with the one that it shows; return the first of them.
   *
   * `onBegin` is called once it runs, `onNews` as it grows. Whatever goes wrong is kept in the
   * choices. Null if the reply is being written already.
   */
  async answer(conversation, { turn, column, reply }, model, { goesOn = false, onBegin, onNews }) {
    if (this.#running.has(reply)) return null;
    const begun = goesOn ? shownOf(reply) : null;
    let request;
    try {
      request = toRequest(conversation, turn, column, model, { reply, begun: begun?.text });
    } catch (error) {
      const failed = { ...newChoice(begun), error: error.message };
      addChoices(reply, [failed]);
      return failed;
    }
    const choices = Array.from({ length: Math.max(1, Math.min(request.body.n ?? 1, MAX_CHOICES)) }, () => newChoice(begun));
    addChoices(reply, choices);
    const controller = new AbortController();
    this.#running.set(reply, controller);
    onBegin();
    await collect(request, choices, controller.signal, onNews);
    this.#running.delete(reply);
    for (const choice of choices) choice.figures.form = judgeAnswer(conversation.settings[column], choice);
    const isVain = (choice) => choice.error && choice.text === (begun?.text ?? "");
    if (choices.every(isVain)) keepOne(reply, choices);
    return choices[0];
  }
}

/** Leave one of several choices that have failed alike. */
function keepOne(reply, [, ...others]) {
  reply.choices = reply.choices.filter((choice) => !others.includes(choice));
  reply.shown = Math.min(reply.shown, reply.choices.length - 1);
}

/** Put choices behind the others and show the first of them; failed ones make room. */
export function addChoices(reply, choices) {
  reply.choices = reply.choices.filter((choice) => choice.text || choice.calls.length || choice.reasoning);
  reply.shown = reply.choices.length;
  reply.choices.push(...choices);
}

/** Take the choice that a reply shows away, and show the one before or behind it. */
export function removeChoice(reply) {
  reply.choices.splice(reply.shown, 1);
  reply.shown = Math.max(0, Math.min(reply.shown, reply.choices.length - 1));
}
