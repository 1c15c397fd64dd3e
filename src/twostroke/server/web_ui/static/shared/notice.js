// Short notices at the foot of the page, read out politely, with at most one thing to do.

import { h } from "./dom.js";

const SHOWN_MS = 6000;
let leaving = 0;

/** Show a sentence for some seconds; `action` is `{label, run}`. */
export function notice(text, action = null) {
  const place = document.getElementById("toasts");
  clearTimeout(leaving);
  const leave = () => place.replaceChildren();
  const button = action && h("button.plain", {
    type: "button",
    onclick: () => {
      leave();
      action.run();
    },
  }, action.label);
  place.replaceChildren(h("p.toast", {}, h("span", {}, text), button));
  const hold = () => {
    leaving = setTimeout(() => (place.matches(":hover, :focus-within") ? hold() : leave()), SHOWN_MS);
  };
  hold();
}
