// Asks for the server's state once a second, only while somebody looks.

import { ask } from "../shared/server.js";

const EVERY_MS = 1000;
const GAP_MS = 3000; // a longer one would show in the charts
const SELDOM_MS = 10_000; // when the server has no state to show, or not to this user

/**
 * `onState` gets each state, `onTrouble` the error when there is none.
 *
 * The first state after a time without any has the server's past with it.
 */
export class Poller {
  #onState;
  #onTrouble;
  #isWanted = false;
  #waiting = 0;
  #isAsking = false;
  #lastState_ms = -Infinity;
  #model = null;

  constructor(onState, onTrouble) {
    this.#onState = onState;
    this.#onTrouble = onTrouble;
    document.addEventListener("visibilitychange", () => this.#wake());
  }

  setWanted(isWanted) {
    this.#isWanted = isWanted;
    this.#wake();
  }

  /** Ask for another model's state from now on. */
  choose(model) {
    this.#model = model;
    this.#lastState_ms = -Infinity;
    this.#wake();
  }

  #wake() {
    clearTimeout(this.#waiting);
    if (this.#isWanted && !document.hidden && !this.#isAsking) this.#ask();
  }

  async #ask() {
    this.#isAsking = true;
    const begun = performance.now();
    let pause = EVERY_MS;
    try {
      const asked = new URLSearchParams();
      const model = this.#model;
      if (begun - this.#lastState_ms > GAP_MS) asked.set("past", "");
      if (model !== null) asked.set("model", model);
      const response = await ask(`api/state?${asked}`, { signal: AbortSignal.timeout(5000) });
      const state = await response.json();
      if (model === this.#model) {
        this.#onState(state);
        this.#lastState_ms = begun;
      } else pause = 0;
    } catch (error) {
      this.#lastState_ms = -Infinity; // a server that began anew has another past
      if (error.status === 404 || error.status === 401) pause = SELDOM_MS;
      this.#onTrouble(error);
    }
    this.#isAsking = false;
    clearTimeout(this.#waiting);
    if (!this.#isWanted || document.hidden) return;
    this.#waiting = setTimeout(() => this.#wake(), Math.max(pause - (performance.now() - begun), 100));
  }
}
