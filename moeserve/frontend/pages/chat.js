// The chat page: one conversation is open, at most one answer is under way.

import { Server, readEvents } from "./api.js";
import { Conversations } from "./conversations.js";
import { button, count, duration, el, find, notify } from "./dom.js";
import { MessageView } from "./messages.js";
import { NOTHING_SET, SettingsForm, requestBody } from "./settings.js";

const LAST_SETTINGS = "moeserve.settings";
const NEAR_THE_END = 80;
const PROGRESS_EVERY_MS = 250;

const server = new Server(["moeserve.key"]);
const store = new Conversations();
const log = find("#messages");
const field = find("#question");
const form = new SettingsForm(keepSettings);

let conversation = null;
let views = new Map();
let models = []; // Names, once the server has told them.
let answering = null; // The AbortController of the answer under way.
let follows = true; // Whether the end of the answer stays in sight.

// Conversations: open, list, rename, export, delete.

function open(next) {
  answering?.abort();
  conversation = next;
  views = new Map();
  log.replaceChildren();
  chooseModel();
  for (const message of conversation.messages) addView(message);
  refreshLast();
  showList();
  find("#empty").hidden = conversation.messages.length > 0;
  follows = true;
  scroll();
}

function openNew() {
  open(store.create(lastSettings()));
  closeList();
  field.focus();
}

/** The conversations beside, and the title of the open one. */
function showList() {
  find("#title").textContent = conversation.title;
  document.title = `${conversation.title} · moeserve`;
  const rows = store.list().map((entry) => {
    const current = entry.id === conversation.id;
    const title = button(entry.title, () => choose(entry.id), { class: "title", "aria-current": current && "true" });
    return el("li", { class: current && "current" }, title, current ? conversationActions(title) : null);
  });
  find("#conversations").replaceChildren(...rows);
}

function choose(id) {
  const chosen = store.get(id);
  if (chosen && id !== conversation.id) open(chosen);
  closeList();
  field.focus();
}

function conversationActions(title) {
  return el(
    "div",
    { class: "actions" },
    button("Rename", () => rename(title), { class: "quiet" }),
    button("Export", exportConversation, { class: "quiet" }),
    button("Delete", remove, { class: "quiet" }),
  );
}

function rename(title) {
  const input = el("input", { "aria-label": "Name of the conversation", maxlength: 120 });
  input.value = conversation.title;
  let done = false;
  const finish = (keep) => {
    if (done) return;
    done = true;
    if (keep && input.value.trim()) {
      conversation.title = input.value.trim();
      save();
    }
    showList();
    find("#conversations .current .title")?.focus();
  };
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") finish(true);
    if (event.key === "Escape") {
      event.stopPropagation();
      finish(false);
    }
  });
  input.addEventListener("blur", () => finish(true));
  title.replaceWith(input);
  input.select();
}

function exportConversation() {
  const content = JSON.stringify(conversation, null, 2);
  const address = URL.createObjectURL(new Blob([content], { type: "application/json" }));
  const name = conversation.title.replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "conversation";
  el("a", { href: address, download: `${name}.json` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}

function remove() {
  answering?.abort();
  const gone = conversation;
  store.remove(gone.id);
  const [next] = store.list();
  open((next && store.get(next.id)) ?? store.create(lastSettings()));
  notify(`“${gone.title}” is deleted.`, ["Undo", () => (keep(gone), open(gone))]);
  field.focus();
}

function save() {
  keep(conversation);
}

function keep(kept) {
  try {
    store.save(kept);
  } catch {
    notify("The browser has no room left: this conversation is not kept. Delete or export others.");
  }
  showList();
}

// Settings and model.

function lastSettings() {
  try {
    return { ...NOTHING_SET, ...JSON.parse(localStorage.getItem(LAST_SETTINGS)), system: "" };
  } catch {
    return NOTHING_SET;
  }
}

function keepSettings(settings) {
  conversation.settings = settings;
  localStorage.setItem(LAST_SETTINGS, JSON.stringify(settings));
  if (conversation.messages.length) save();
  showModel();
}

/** A conversation whose model is not served any more goes on with the first that is. */
function chooseModel() {
  const { settings } = conversation;
  if (models.length && !models.includes(settings.model)) settings.model = models[0];
  form.show(settings);
  showModel();
}

function showModel() {
  find("#model-name").textContent = conversation.settings.model;
}

async function loadModels() {
  const { data } = await server.json("/v1/models");
  models = data.map((model) => model.id);
  form.showModels(models);
  chooseModel();
}

// Messages.

function addView(message) {
  const view = new MessageView(message, { edit, regenerate, retry: regenerate, sendResults });
  views.set(message, view);
  log.append(view.root);
  return view;
}

function add(message) {
  conversation.messages.push(message);
  find("#empty").hidden = true;
  return addView(message);
}

/** Drops a message and all that follow. */
function cutAt(message) {
  for (const dropped of conversation.messages.splice(conversation.messages.indexOf(message))) {
    views.get(dropped).root.remove();
    views.delete(dropped);
  }
}

function refreshLast() {
  const last = conversation.messages.at(-1);
  for (const [message, view] of views) {
    if (message.role === "assistant") view.update({ last: message === last, busy: false });
  }
}

function send() {
  const text = field.value.trim();
  if (!text || answering) return;
  field.value = "";
  fit();
  add({ role: "user", content: text });
  save();
  answer();
}

function edit(message, text) {
  answering?.abort();
  cutAt(message);
  add({ role: "user", content: text });
  answer();
  field.focus();
}

function regenerate(message) {
  answering?.abort();
  cutAt(message);
  answer();
  field.focus();
}

function sendResults(message, results) {
  for (const { call, content } of results) {
    add({ role: "tool", tool_call_id: call.id, name: call.function.name, content });
  }
  answer();
  field.focus();
}

/** The messages in the API's form: without reasoning, and without answers that say nothing. */
function wireMessages(messages) {
  return messages
    .filter((message) => message.role !== "assistant" || message.content || message.tool_calls?.length)
    .map(({ role, content, tool_calls, tool_call_id }) => {
      const plain = { role, content };
      if (tool_calls?.length) Object.assign(plain, { tool_calls, content: content || null });
      return tool_call_id ? { ...plain, tool_call_id } : plain;
    });
}

async function answer() {
  const asked = conversation;
  const said = wireMessages(asked.messages);
  const message = { role: "assistant", content: "", reasoning: "", tool_calls: [], stats: null };
  const view = add(message);
  const control = new AbortController();
  answering = control;
  follows = true;
  showAnswering(true);
  refreshLast();
  view.update({ last: true, busy: true });
  const drawing = new Drawing(() => {
    view.update({ last: true, busy: true });
    scroll();
  });
  scroll();
  try {
    // Whoever is quick asks before the server has told its models.
    if (!models.length) await loadModels();
    asked.settings.model ||= models[0];
    await stream(requestBody(asked.settings, said), message, control.signal, drawing, (text) => answering === control && showProgress(text));
  } catch (error) {
    if (control.signal.aborted) message.stopped = true;
    else message.error = error.message;
  }
  drawing.stop();
  if (answering === control) {
    answering = null;
    showAnswering(false);
    showProgress("");
    announce(message);
  }
  // The conversation may have been deleted, or the answer dropped, while it came.
  if (asked.messages.includes(message) && (asked === conversation || store.get(asked.id))) keep(asked);
  if (asked === conversation) refreshLast();
  scroll();
}

/** Asks, and fills the message while the answer comes. tell: is called with a line about what has come. */
async function stream(body, message, signal, drawing, tell) {
  const seen = { begin: performance.now(), first: null, last: null, usage: null, prompt: null, told: 0 };
  const telling = setInterval(() => tell(progressOf(seen)), PROGRESS_EVERY_MS);
  try {
    const response = await server.request("/v1/chat/completions", { method: "POST", body, signal });
    for await (const { data } of readEvents(response)) {
      if (data === "[DONE]") break;
      const event = JSON.parse(data);
      if (event.error) throw new Error(event.error.message);
      if (event.prompt_progress) Object.assign(seen, { prompt: event.prompt_progress, told: performance.now() });
      seen.usage = event.usage ?? seen.usage;
      const choice = event.choices?.[0];
      if (choice && take(message, choice)) {
        seen.last = performance.now();
        seen.first ??= seen.last;
        drawing.ask();
      }
    }
  } finally {
    clearInterval(telling);
  }
  message.stats = statsOf(seen);
}

/** What has come of an answer, in a line: how long the first token takes, then how many tokens and how fast. */
function progressOf(seen) {
  const now = performance.now();
  if (seen.first === null) return seen.prompt ? promptLine(seen.prompt, now - seen.told) : `waiting for the first token · ${Math.floor((now - seen.begin) / 1000)} s`;
  const { rate, tokens } = statsOf({ ...seen, last: now });
  return `${count(tokens)} tokens${rate ? ` · ${rate.toFixed(1)} tokens/s` : ""}`;
}

/** How far a prompt was `since` milliseconds ago, and how much of the predicted time is left now. */
function promptLine({ total, cache, processed, left_ms: left }, since) {
  const done = `prompt: ${count(processed)} of ${count(total)} (${count(cache)} cached)`;
  return left - since < 500 ? done : `${done} · ${duration((left - since) / 1000)} left`;
}

/** Adds a choice of an event to the message; whether it held anything. */
function take(message, { delta, finish_reason: reason }) {
  if (reason) message.finish_reason = reason;
  const reasoning = delta.reasoning ?? delta.reasoning_content ?? "";
  const content = delta.content ?? "";
  message.reasoning += reasoning;
  message.content += content;
  for (const part of delta.tool_calls ?? []) {
    const call = (message.tool_calls[part.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
    call.id ||= part.id ?? "";
    call.function.name ||= part.function?.name ?? "";
    call.function.arguments += part.function?.arguments ?? "";
  }
  return Boolean(reasoning || content || delta.tool_calls?.length);
}

function statsOf({ begin, first, last, usage }) {
  const tokens = usage?.completion_tokens ?? 0;
  return {
    ttft: first === null ? null : (first - begin) / 1000,
    rate: tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null,
    tokens,
    prompt: usage?.prompt_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
  };
}

/** Draws at most once a frame. */
class Drawing {
  constructor(draw) {
    this.draw = draw;
    this.frame = 0;
  }

  ask() {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      this.draw();
    });
  }

  stop() {
    cancelAnimationFrame(this.frame);
  }
}

// The page around the messages.

function showAnswering(busy) {
  find("#send").hidden = busy;
  find("#stop").hidden = !busy;
  if (busy) find("#status").textContent = "The answer begins.";
}

function showProgress(text) {
  const line = find("#progress");
  line.textContent = text;
  line.hidden = !text;
}

function announce(message) {
  const text = message.error ?? (message.stopped ? "Stopped." : "The answer is complete.");
  find("#status").textContent = text;
}

function scroll() {
  const area = find("#scroll");
  if (follows) area.scrollTop = area.scrollHeight;
  find("#to-end").hidden = follows;
}

function fit() {
  field.style.height = "auto";
  field.style.height = `${Math.min(field.scrollHeight, window.innerHeight * 0.4)}px`;
}

function closeList() {
  document.body.classList.remove("list-open");
  find("#list-open").setAttribute("aria-expanded", "false");
}

function listen() {
  find("#composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  field.addEventListener("input", fit);
  field.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  find("#stop").addEventListener("click", () => {
    answering?.abort();
    field.focus();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || document.querySelector("dialog[open]")) return;
    if (document.body.classList.contains("list-open")) {
      closeList();
      find("#list-open").focus();
    } else answering?.abort();
  });
  for (const starter of document.querySelectorAll("[data-question]")) {
    starter.addEventListener("click", () => {
      field.value = starter.dataset.question;
      send();
      field.focus();
    });
  }
  find("#new").addEventListener("click", openNew);
  find("#key").addEventListener("click", async () => {
    if (await server.askForKey()) start();
  });
  find("#list-open").addEventListener("click", () => {
    const isOpen = document.body.classList.toggle("list-open");
    find("#list-open").setAttribute("aria-expanded", String(isOpen));
    if (isOpen) find("#new").focus();
  });
  find("#veil").addEventListener("click", closeList);
  find("#scroll").addEventListener("scroll", () => {
    const area = find("#scroll");
    follows = area.scrollHeight - area.scrollTop - area.clientHeight < NEAR_THE_END;
    find("#to-end").hidden = follows;
  });
  find("#to-end").addEventListener("click", () => {
    follows = true;
    scroll();
  });
  // What has come of an answer is kept when the page is left.
  window.addEventListener("pagehide", () => answering && keep(conversation));
  store.onForeignChange(showList);
}

async function start() {
  try {
    await loadModels();
    find("#status").textContent = "";
  } catch (error) {
    notify(error.message, ["Try again", start]);
  }
}

const [latest] = store.list();
open((latest && store.get(latest.id)) ?? store.create(lastSettings()));
listen();
start();
field.focus();
