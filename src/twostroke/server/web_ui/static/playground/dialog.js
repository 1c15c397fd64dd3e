// The window that shows a request as curl, Python or JSON.

import { codeBlock } from "../markdown/draw.js";
import { h, iconButton } from "../shared/dom.js";
import { hasKey } from "../shared/key.js";
import { makeTabs } from "../shared/tabs.js";
import { snippets } from "./snippets.js";

/** Open it for a request; it removes itself when closed. */
export function showRequest(path, body) {
  const base = new URL(".", location.href).href.replace(/\/$/, "");
  const found = snippets(base, path, body, hasKey());
  const tabs = h("div.tabs", { role: "tablist", "aria-label": "Languages" }, found.map(({ name }, index) =>
    h("button", { type: "button", role: "tab", id: `request-tab-${index}`, "aria-controls": `request-${index}`, "aria-selected": String(index === 0), tabindex: index ? "-1" : "0" }, name)));
  const panels = found.map(({ language, text }, index) =>
    h("div", { role: "tabpanel", id: `request-${index}`, "aria-labelledby": `request-tab-${index}`, hidden: index > 0 }, codeBlock(language, text)));
  const close = iconButton("close", "Close", () => dialog.close());
  const dialog = h("dialog.request", { "aria-labelledby": "request-title" }, h("header", {}, h("h2", { id: "request-title" }, "This request"), close), tabs, panels);
  makeTabs(tabs, () => {});
  dialog.addEventListener("close", () => dialog.remove());
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  document.body.append(dialog);
  dialog.showModal();
}
