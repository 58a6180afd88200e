// The answers that are under way, as `GET /v1/requests` tells them, and what keys have used, as `GET /v1/usage` does.

import { button, count, el, find, notify, period } from "./dom.js";

function table(caption, names, rows) {
  const head = el("tr", {}, names.map((name) => el("th", { scope: "col" }, name)));
  return el("table", { class: "list", "aria-label": caption }, el("thead", {}, head), el("tbody", {}, rows));
}

const cell = (...content) => el("td", {}, ...content);
const number = (text) => el("td", { class: "number" }, text);

/** A bar with its value in words beside it. */
function progress(value, max, label) {
  return [el("progress", { value, max: Math.max(max, 1), "aria-hidden": "true" }), ` ${label}`];
}

export class RequestPanel {
  constructor(server, changed) {
    this.server = server;
    this.changed = changed;
  }

  show({ data }) {
    const names = ["Answer", "Key", "Route", "Prompt", "Tokens", "Age", ""];
    const rows = data.map((request) => this.row(request));
    find("#open .content").replaceChildren(rows.length ? table("Requests", names, rows) : el("p", { class: "note" }, "None is under way."));
  }

  row(request) {
    const { id, key, route, choices, running, prompt_tokens: prompt, computed_tokens: computed, cached_tokens: cached } = request;
    const isRead = computed >= prompt - 1;
    const words = `${count(isRead ? prompt : computed)} of ${count(prompt)}, ${count(cached)} cached`;
    const where = running ? progress(isRead ? prompt : computed, prompt, words) : [`${count(prompt)}, waits`];
    const name = el("span", { class: "text", title: id }, id);
    return el(
      "tr",
      {},
      cell(name, choices > 1 ? ` × ${choices}` : ""),
      cell(key ?? "–"),
      cell(route ?? "–"),
      cell(...where),
      number(count(request.completion_tokens)),
      number(period(request.age_s)),
      cell(button("Cancel", (event) => this.cancel(id, event.target), { class: "quiet", "aria-label": `Cancel ${id}` })),
    );
  }

  async cancel(id, pressed) {
    pressed.disabled = true;
    try {
      await this.server.json(`/v1/requests/${encodeURIComponent(id)}/cancel`, { method: "POST" });
    } catch (error) {
      notify(error.message);
    }
    this.changed();
  }
}

export class KeyPanel {
  show({ data }) {
    const names = ["Key", "Running", "Waiting", "Answers today", "Tokens today", "Cached", "Left today"];
    const busiest = [...data].sort((one, other) => other.today.total_tokens - one.today.total_tokens);
    find("#keys .content").replaceChildren(table("Keys", names, busiest.map(keyRow)));
  }
}

function keyRow({ key, valid, running, waiting, today, limits }) {
  const cached = today.prompt_tokens ? `${Math.round((100 * today.cached_tokens) / today.prompt_tokens)} %` : "–";
  const tokens = limits.tokens;
  const left = tokens ? progress(tokens.left, tokens.limit, `${count(tokens.left)} of ${count(tokens.limit)}`) : ["no limit"];
  return el(
    "tr",
    {},
    cell(key ?? "without keys", ...(valid ? [] : [" ", el("span", { class: "tag" }, "not valid")])),
    number(count(running)),
    number(count(waiting)),
    number(count(today.requests)),
    number(count(today.total_tokens)),
    number(cached),
    cell(...(valid ? left : ["–"])),
  );
}
