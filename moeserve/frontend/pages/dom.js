// Elements are made node by node: text never becomes HTML.

const SVG = "http://www.w3.org/2000/svg";

/** An element. Attributes that begin with "on" are listeners, true and false set and leave out. */
export function el(tag, attributes = {}, ...children) {
  return fill(document.createElement(tag), attributes, children);
}

export function svg(tag, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, tag), attributes, children);
}

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return element;
}

export function button(label, onclick, attributes = {}) {
  return el("button", { type: "button", onclick, ...attributes }, label);
}

export function find(selector) {
  return document.querySelector(selector);
}

/** Copies text and says so on the button for a moment. */
export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

let notice = null;
let noticeTimer = 0;

/** Shows one sentence at the foot of the page, with an action if given: [label, function]. */
export function notify(text, action = null) {
  notice ??= document.body.appendChild(el("div", { class: "notice", role: "status" }));
  const hide = () => notice.replaceChildren();
  const parts = [el("span", {}, text)];
  if (action) parts.push(button(action[0], () => (hide(), action[1]())));
  notice.replaceChildren(...parts, button("Close", hide, { class: "quiet" }));
  clearTimeout(noticeTimer);
  noticeTimer = setTimeout(hide, 10000);
}

export function milliseconds(seconds) {
  const ms = seconds * 1000;
  if (ms < 10) return `${ms.toFixed(1)} ms`;
  return ms < 1000 ? `${Math.round(ms)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

/** A time that passes while one waits: seconds, then minutes. */
export function duration(seconds) {
  return seconds < 120 ? `${Math.max(1, Math.round(seconds))} s` : `${Math.round(seconds / 60)} min`;
}

export function period(seconds) {
  const units = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
  const [size, unit] = units.find(([size]) => seconds >= size) ?? units.at(-1);
  return `${Math.round(seconds / size)} ${unit}`;
}

export function count(number) {
  return Math.round(number).toLocaleString("en");
}
