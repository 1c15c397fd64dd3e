// The key that a server may ask for: asked of the user once it is refused, kept until the tab closes.

import { h, iconButton } from "./dom.js";

const STORED = "twostroke.key";
let given = stored();
let asking = null; // the promise of the window that is open
let isDeclined = false;

/** Return the headers that carry the key; none where none was given. */
export function keyHeaders() {
  return given ? { authorization: `Bearer ${given}` } : {};
}

/** Whether requests carry a key. */
export function hasKey() {
  return Boolean(given);
}

/**
 * Ask the user for a key, because a request was refused with `why`; return whether there is one now.
 *
 * Who closed the window is not asked again for what the page does by itself, but for what they do:
 * then `isForUser`.
 */
export function wantKey(why, isForUser) {
  if (asking) return asking;
  if (isDeclined && !isForUser) return Promise.resolve(false);
  document.getElementById("key").hidden = false;
  asking = new Promise((resolve) => open(why, resolve)).finally(() => {
    asking = null;
  });
  return asking;
}

/** Ask for a key because the user wants to give one; return whether there is one now. */
export function askAnew() {
  return wantKey("", true);
}

function open(why, resolve) {
  const note = h("p.why", { id: "key-why", role: "alert" }, why);
  const field = h("input", {
    type: "password", id: "key-field", autocomplete: "off", spellcheck: "false", "aria-describedby": "key-why key-hint",
  });
  const close = iconButton("close", "Close", () => dialog.close());
  const form = h("form", {
    onsubmit: (event) => {
      event.preventDefault();
      const key = field.value.trim();
      if (!/^[!-~]+$/.test(key)) {
        note.textContent = "An API key has letters, digits and punctuation, without spaces.";
        return;
      }
      store(key);
      dialog.close("given");
    },
  },
    h("label", { for: "key-field" }, "Key"),
    field,
    h("p.hint", { id: "key-hint" }, "The page sends the key with each request to this server, and forgets it when this tab is closed."),
    h("footer", {}, h("button.primary", { type: "submit" }, "Use key")));
  const dialog = h("dialog.wanted", { "aria-labelledby": "key-title" },
    h("header", {}, h("h2", { id: "key-title" }, "This server requires an API key"), close), note, form);
  dialog.addEventListener("close", () => {
    const isGiven = dialog.returnValue === "given";
    dialog.remove();
    isDeclined = !isGiven;
    resolve(isGiven);
  });
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}

function stored() {
  try {
    return sessionStorage.getItem(STORED) ?? "";
  } catch {
    return ""; // the browser keeps nothing for this page
  }
}

function store(key) {
  given = key;
  try {
    sessionStorage.setItem(STORED, key);
  } catch {
    // it is asked for again with the next visit
  }
}
