// Copies text, also where the browser has no clipboard because the address is not a secure one.

import { notice } from "./notice.js";

/** Copy `text` and say so. */
export async function copy(text, what = "Copied.") {
  notice((await write(text)) ? what : "The browser does not let this page copy.");
}

async function write(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return writeByHand(text);
  }
}

function writeByHand(text) {
  const before = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "unseen";
  document.body.append(area);
  area.select();
  const done = document.execCommand("copy");
  area.remove();
  before?.focus();
  return done;
}
