// The top of the prefix tree, as `GET /v1/cache` tells it: the prefixes that saved the most, below what they begin with.

import { button, count, el, find, milliseconds } from "./dom.js";

const MAX_ROWS = 40;
const SECOND_CLICK_MS = 4000;

/** Prefixes in the order of a tree, each with its depth; those whose parent is not told are at the top. */
export function inTreeOrder(prefixes) {
  const below = new Map();
  const ids = new Set(prefixes.map((prefix) => prefix.id));
  for (const prefix of prefixes) {
    const parent = ids.has(prefix.parent) ? prefix.parent : null;
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(prefix);
  }
  const rows = [];
  const waiting = [...(below.get(null) ?? [])].reverse().map((prefix) => [prefix, 0]);
  while (waiting.length) {
    const [prefix, depth] = waiting.pop();
    rows.push({ prefix, depth });
    waiting.push(...[...(below.get(prefix.id) ?? [])].reverse().map((child) => [child, depth + 1]));
  }
  return rows;
}

export class PrefixPanel {
  /** act: sends a request (path, body, method), and shows the tree again. */
  constructor(act) {
    this.act = act;
    find("#warm").addEventListener("click", () => this.warm());
    find("#drop").addEventListener("click", ({ target }) => this.drop(target));
  }

  /** Drops all prefixes of the own key at the second click. */
  drop(clicked) {
    const label = "Drop mine";
    if (clicked.textContent !== label) {
      clicked.textContent = label;
      this.act("/v1/cache", undefined, "DELETE");
      return;
    }
    clicked.textContent = "Drop all of mine?";
    setTimeout(() => (clicked.textContent = label), SECOND_CLICK_MS);
  }

  /** Asks for a text, which is then computed and cached. */
  warm() {
    const text = el("textarea", { id: "warm-text", rows: 8, required: true });
    const close = button("Cancel", () => dialog.close(), { class: "quiet" });
    const form = el(
      "form",
      { method: "dialog" },
      el("h2", {}, "Warm a prefix"),
      el("label", { for: "warm-text" }, "Text with which prompts will begin, as /v1/completions reads it"),
      text,
      el("div", { class: "actions" }, close, el("button", { type: "submit", class: "primary" }, "Compute and cache")),
    );
    form.addEventListener("submit", () => this.act("/v1/cache/warm", { prompt: text.value }));
    const dialog = el("dialog", { class: "key-dialog", "aria-label": "Warm a prefix" }, form);
    dialog.addEventListener("close", () => dialog.remove());
    document.body.append(dialog);
    dialog.showModal();
  }

  show(described) {
    const prefixes = described.prefixes ?? [];
    this.showFacts(described);
    const rows = inTreeOrder(prefixes).slice(0, MAX_ROWS);
    const most = Math.max(1, ...prefixes.map((prefix) => prefix.tokens_saved));
    const head = ["Begins with", "Tokens", "Hits", "Tokens saved", ""].map((name) => el("th", { scope: "col" }, name));
    const table = el("table", { class: "prefixes" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows.map((row) => this.row(row, most))));
    find("#prefix-tree").replaceChildren(rows.length ? table : el("p", { class: "note" }, "Nothing is cached yet."));
  }

  showFacts({ num_prefixes: all, budget, host, disk }) {
    const facts = [];
    if (all !== undefined) facts.push(["in memory", count(all)]);
    if (budget?.blocks) {
      facts.push(["retained", `${count(budget.retained)} of ${count(budget.blocks)} blocks`]);
      facts.push(["of which pinned", `${count(budget.pinned)} blocks`]);
    }
    if (host) facts.push(["in host memory", `${count(host.blocks)} blocks`]);
    if (disk) facts.push(["on disk", `${count(disk.blocks)} blocks`]);
    find("#prefix-facts").replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  /** The button that pins a prefix of the own key, or lets it go. */
  pinning({ id, own = true, pinned }) {
    if (!own) return null;
    return button(pinned ? "Unpin" : "Pin", () => this.act(`/v1/cache/${pinned ? "unpin" : "pin"}`, { id }), { class: "quiet" });
  }

  row({ prefix, depth }, most) {
    const text = prefix.preview;
    const shown = el("span", { class: "text", title: text }, text.replace(/\s+/g, " ").trim() || "(spaces)");
    const begins = el("div", { class: "begins" }, shown, tags(prefix));
    begins.style.setProperty("--depth", depth);
    const bar = el("span", { class: "bar" }, el("span"));
    bar.firstChild.style.width = `${(100 * prefix.tokens_saved) / most}%`;
    const number = (value, ...more) => el("td", { class: "number" }, count(value), more);
    return el("tr", {}, el("td", {}, begins), number(prefix.prefix_tokens), number(prefix.hits), number(prefix.tokens_saved, bar), el("td", {}, this.pinning(prefix)));
  }
}

function tags(prefix) {
  const names = [];
  if (prefix.pinned) names.push("pinned");
  else if (prefix.retained_for_s) names.push(`kept for ${milliseconds(prefix.retained_for_s)}`);
  else if (prefix.retained) names.push("kept");
  if (prefix.in_use) names.push("in use");
  return names.map((name) => el("span", { class: "tag" }, name));
}
