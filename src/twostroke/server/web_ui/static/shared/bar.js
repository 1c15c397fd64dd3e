// The buttons of the bar at the top: the theme, and another API key.

import { icon } from "./dom.js";
import { askAnew, hasKey } from "./key.js";

/** Let the button change the colours. */
export function startTheme() {
  const button = document.getElementById("theme");
  const drawings = { system: "system", light: "sun", dark: "moon" };
  const words = { system: "system", light: "light", dark: "dark" };
  const show = (theme) => {
    button.replaceChildren(icon(drawings[theme]));
    button.setAttribute("aria-label", `Theme: ${words[theme]}`);
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => show(window.twostrokeTheme.next()));
  show(window.twostrokeTheme.get());
}

/** Let the button ask for another key. */
export function startKey() {
  const button = document.getElementById("key");
  button.append(icon("key"));
  button.hidden = !hasKey();
  button.addEventListener("click", async () => {
    if (await askAnew()) location.reload(); // so that all of the page asks with it
  });
}
