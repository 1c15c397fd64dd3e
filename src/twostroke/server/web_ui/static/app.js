// Starts the page: its views, the colours, and the lamp that tells how the server is.

import { Dashboard } from "./dashboard/view.js";
import { Planning } from "./plan/view.js";
import { Playground } from "./playground/view.js";
import { startKey, startTheme } from "./shared/bar.js";
import { h } from "./shared/dom.js";
import { listModels, watchServer } from "./shared/server.js";
import { makeTabs } from "./shared/tabs.js";

const playground = new Playground(document.getElementById("view-playground"));
const dashboard = new Dashboard(document.getElementById("view-dashboard"));
const planning = new Planning(document.getElementById("view-plan"));
let chosen = null; // one of several models

startTabs();
startTheme();
startKey();
watchServer(showServer);

function startTabs() {
  const list = document.querySelector(".bar .tabs");
  const choose = makeTabs(list, (tab) => {
    document.title = tab.id === "tab-playground" ? "Twostroke" : `${tab.textContent} – Twostroke`;
    dashboard.setVisible(tab.id === "tab-dashboard");
    planning.setVisible(tab.id === "tab-plan");
  });
  const follow = () => {
    choose(document.getElementById(`tab-${location.hash.slice(1)}`) ?? document.getElementById("tab-playground"));
  };
  window.addEventListener("hashchange", follow);
  follow();
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the address keeps naming the view
    document.getElementById("main").focus();
  });
}

function showServer({ status, model }) {
  const words = {
    ok: model,
    draining: `${model} is stopping`,
    stalled: `${model} makes no progress`,
    recovering: `${model} replaces lost ranks`,
    stopped: `${model} has stopped`,
    gone: "Server not reachable, trying again …",
  };
  document.getElementById("served").textContent = words[status] ?? status;
  document.getElementById("lamp").dataset.state = status;
  if (model) playground.setModel(chosen ?? model);
  if (status === "ok") listModels().then((models) => showModels(models, chosen ?? model));
}

/** Let the user choose if there are several models. */
function showModels(models, model) {
  playground.setAbilities(models.find(({ id }) => id === model)?.capabilities ?? null);
  if (models.length < 2) return;
  const options = models.map(({ id }) => h("option", { value: id, selected: id === model }, id));
  const choice = h("select", { "aria-label": "Model" }, options);
  choice.addEventListener("change", () => {
    chosen = choice.value;
    playground.setModel(chosen);
    showModels(models, chosen);
  });
  document.getElementById("served").replaceChildren(choice);
}
