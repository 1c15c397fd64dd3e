// Makes elements. Text becomes text nodes only, so nothing that a model writes becomes markup.

/**
 * Return an element: `h("button.small", {type: "button", onclick: send}, "Send")`.
 *
 * Properties that begin with "on" are listeners; true and false set and leave out attributes.
 */
export function h(name, given = {}, ...children) {
  const [tag, ...classes] = name.split(".");
  const element = document.createElement(tag);
  if (classes.length) element.className = classes.join(" ");
  put(element, given);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** Return an SVG element; `given` are its attributes. */
export function svg(tag, given = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  put(element, given);
  element.append(...children.flat());
  return element;
}

function put(element, given) {
  for (const [key, value] of Object.entries(given)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value === true) element.setAttribute(key, "");
    else if (value !== false && value !== null && value !== undefined) {
      element.setAttribute(key, value);
    }
  }
}

const ICONS = {
  plus: "M8 3v10M3 8h10",
  menu: "M2.5 4.5h11M2.5 8h11M2.5 11.5h11",
  sliders: "M2.5 5h5m3 0h3M2.5 11h2m3 0h6M9 3.5v3M6 9.5v3",
  code: "M5.5 4.5 2 8l3.5 3.5M10.5 4.5 14 8l-3.5 3.5",
  columns: "M2.5 3h11v10h-11zM8 3v10",
  text: "M3 4h10M3 8h10M3 12h6",
  copy: "M5.5 5.5h8v8h-8zM10.5 5.5v-3h-8v8h3",
  again: "M13 8a5 5 0 1 1-1.5-3.6M13 2v3h-3",
  edit: "M3 13l.6-2.8L10.8 3l2.2 2.2-7.2 7.2zM9.3 4.5l2.2 2.2",
  trash: "M3 4.5h10M6 4.5v-2h4v2M4.5 4.5l.5 9h6l.5-9",
  close: "M4 4l8 8M12 4l-8 8",
  clip: "M12.5 7 7.6 11.9a2.5 2.5 0 0 1-3.5-3.5l5.3-5.3a1.7 1.7 0 0 1 2.4 2.4L6.6 10.7a.8.8 0 0 1-1.2-1.2l4.4-4.4",
  send: "M8 13V3M3.5 7.5 8 3l4.5 4.5",
  stop: "M4.5 4.5h7v7h-7z",
  left: "M9.5 3.5 5 8l4.5 4.5",
  right: "M6.5 3.5 11 8l-4.5 4.5",
  onward: "M3 3.5 7.5 8 3 12.5M8.5 3.5 13 8l-4.5 4.5",
  sun: "M8 5a3 3 0 1 0 0 6 3 3 0 0 0 0-6M8 1v1.5M8 13.5V15M1 8h1.5M13.5 8H15M3 3l1 1M12 12l1 1M13 3l-1 1M4 12l-1 1",
  moon: "M13.5 9.5A6 6 0 0 1 6.5 2.5a6 6 0 1 0 7 7z",
  key: "M5 11.5a3.5 3.5 0 1 1 3.2-5H14V9h-1.5v2H10V9H8a3.5 3.5 0 0 1-3 2.5M4.8 8h.4",
  system: "M2 3h12v8H2zM5.5 13.5h5",
};

/** Return one of the page's own line drawings. */
export function icon(name) {
  const path = svg("path", {
    d: ICONS[name],
    fill: name === "stop" ? "currentColor" : "none",
    stroke: "currentColor",
    "stroke-width": "1.5",
    "stroke-linecap": "round",
    "stroke-linejoin": "round",
  });
  return svg("svg", { viewBox: "0 0 16 16", width: "16", height: "16", "aria-hidden": "true" }, path);
}

/** Return a button with an icon and a name for those who do not see it. */
export function iconButton(drawing, label, onclick, given = {}) {
  const button = h("button.icon", { type: "button", title: label, "aria-label": label, onclick, ...given });
  button.append(icon(drawing));
  return button;
}
