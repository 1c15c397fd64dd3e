// Starts the page: the colours, and the lamp that tells how the server is.

import { Playground } from "./playground/view.js";
import { icon } from "./shared/dom.js";
import { watchServer } from "./shared/server.js";
import { makeTabs } from "./shared/tabs.js";

const playground = new Playground(document.getElementById("view-playground"));

startTabs();
startTheme();
watchServer(showServer);

function startTabs() {
  makeTabs(document.querySelector(".bar .tabs"), () => {});
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address keeps naming the view
    document.getElementById("main").focus();
  });
}

function startTheme() {
  const button = document.getElementById("theme");
  const drawings = { system: "system", light: "sun", dark: "moon" };
  const words = { system: "as the system has them", light: "light", dark: "dark" };
  const show = (theme) => {
    button.replaceChildren(icon(drawings[theme]));
    button.setAttribute("aria-label", `Colours: ${words[theme]}`);
    button.title = button.getAttribute("aria-label");
  };
  button.addEventListener("click", () => show(window.twostrokeTheme.next()));
  show(window.twostrokeTheme.get());
}

function showServer({ status, model }) {
  const words = {
    ok: model,
    draining: `${model} is stopping`,
    stalled: `${model} makes no progress`,
    stopped: `${model} has stopped`,
    gone: "Server not reachable, trying again …",
  };
  document.getElementById("served").textContent = words[status] ?? status;
  document.getElementById("lamp").dataset.state = status;
  if (model) playground.setModel(model);
}
