// Tabs: one stop for the Tab key, arrow keys between them, as the ARIA guide has it.

/** Let `list` choose among its tabs; `onChoose` is called with the chosen one. */
export function makeTabs(list, onChoose) {
  const tabs = [...list.querySelectorAll('[role="tab"]')];

  const choose = (tab) => {
    for (const one of tabs) {
      const isChosen = one === tab;
      one.setAttribute("aria-selected", String(isChosen));
      one.tabIndex = isChosen ? 0 : -1;
      setHidden(one, !isChosen);
    }
    setHidden(tab, false); // tabs may share a panel
    onChoose(tab);
  };

  list.addEventListener("keydown", (event) => {
    const here = tabs.indexOf(document.activeElement);
    const goal = { ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tabs.length - 1 }[event.key];
    if (here < 0 || goal === undefined) return;
    event.preventDefault();
    const tab = tabs[(goal + tabs.length) % tabs.length];
    tab.focus();
    tab.click();
  });
  for (const tab of tabs) tab.addEventListener("click", () => choose(tab));
  return choose;
}

function setHidden(tab, isHidden) {
  const panel = document.getElementById(tab.getAttribute("aria-controls"));
  if (panel) panel.hidden = isHidden;
}
