// The chat page: one conversation is open, at most one answer is under way.

import { emptyAnswer, streamAnswer, wireMessages } from "./answers.js";
import { Server } from "./api.js";
import { Attachments } from "./attachments.js";
import { Conversations } from "./conversations.js";
import { button, count, el, find, notify } from "./dom.js";
import { MessageView } from "./messages.js";
import { NOTHING_SET, SettingsForm, requestBody } from "./settings.js";
import { showSnippets } from "./snippets.js";
import { beginVersion, turnTo } from "./versions.js";

const LAST_SETTINGS = "moeserve.settings";
const NEAR_THE_END = 80;

const server = new Server(["moeserve.key"]);
const store = new Conversations();
const log = find("#messages");
const field = find("#question");
const form = new SettingsForm(keepSettings);
const attachments = new Attachments();

let conversation = null;
let views = new Map();
let models = []; // As the server tells them.
let answering = null; // The AbortController of the answer under way.
let follows = true; // Whether the end of the answer stays in sight.

// Conversations: open, list, rename, export, delete.

function open(next) {
  answering?.abort();
  conversation = next;
  chooseModel();
  showMessages();
  showList();
  follows = true;
  scroll();
}

/** All messages of the open conversation. */
function showMessages() {
  views = new Map();
  log.replaceChildren();
  for (const message of conversation.messages) addView(message);
  find("#empty").hidden = conversation.messages.length > 0;
  refreshLast();
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
  const rows = store.search(find("#search").value).map((entry) => {
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

async function importConversations(files) {
  for (const file of files) {
    try {
      const read = store.read(await file.text(), lastSettings());
      keep(read);
      open(read);
    } catch (error) {
      notify(`“${file.name}” is no exported conversation: ${error.message}.`);
    }
  }
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
  if (models.length && !models.some(({ id }) => id === settings.model)) settings.model = models[0].id;
  form.show(settings);
  showModel();
}

function showModel() {
  find("#model-name").textContent = conversation.settings.model;
}

async function loadModels() {
  const { data } = await server.json("/v1/models");
  models = data;
  const about = find("#about-model");
  about.textContent = data[0]?.description ?? "";
  about.hidden = !about.textContent;
  form.showModels(models);
  chooseModel();
  showContext();
}

/** How much of the context the conversation takes, as of the latest answer. */
function showContext() {
  const stats = conversation.messages.findLast((message) => message.stats?.prompt)?.stats;
  const most = models.find(({ id }) => id === conversation.settings.model)?.max_model_len;
  const meter = find("#context");
  meter.hidden = !stats || !most;
  if (meter.hidden) return;
  const used = Math.min(most, stats.prompt + stats.tokens);
  find("#context-text").textContent = `${count(used)} of ${count(most)} tokens`;
  Object.assign(find("#context meter"), { max: most, high: 0.9 * most, value: used });
}

// Messages.

function addView(message) {
  const view = new MessageView(message, { edit, regenerate, goOn, turn, retry, sendResults });
  views.set(message, view);
  log.append(view.root);
  return view;
}

function add(message) {
  conversation.messages.push(message);
  find("#empty").hidden = true;
  addView(message);
  return message;
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
  showContext();
}

function send() {
  const text = field.value.trim();
  if ((!text && !attachments.files.length) || answering) return;
  field.value = "";
  fit();
  const files = attachments.take();
  add({ role: "user", content: text, ...(files.length && { files }) });
  save();
  answer(add(emptyAnswer()));
}

function edit(message, text) {
  answering?.abort();
  beginVersion(conversation.messages, message, { role: "user", content: text, ...(message.files && { files: message.files }) });
  showMessages();
  answer(add(emptyAnswer()));
  field.focus();
}

function regenerate(message) {
  answering?.abort();
  const again = beginVersion(conversation.messages, message, emptyAnswer());
  showMessages();
  answer(again);
  field.focus();
}

function retry(message) {
  answering?.abort();
  cutAt(message);
  answer(add(emptyAnswer()));
  field.focus();
}

/** Goes on with an answer that was stopped or cut off. */
function goOn(message) {
  for (const name of ["stopped", "finish_reason", "error"]) delete message[name];
  answer(message, { continue_final_message: true, add_generation_prompt: false });
  field.focus();
}

function turn(message, version) {
  answering?.abort();
  turnTo(conversation.messages, message, version);
  showMessages();
  save();
}

function sendResults(message, results) {
  for (const { call, content } of results) {
    add({ role: "tool", tool_call_id: call.id, name: call.function.name, content });
  }
  answer(add(emptyAnswer()));
  field.focus();
}

/** Asks for what the message, the last one, is to hold. extra: fields of the request. */
async function answer(message, extra = {}) {
  const asked = conversation;
  const said = wireMessages(asked.messages);
  const view = views.get(message);
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
    asked.settings.model ||= models[0].id;
    const body = { ...requestBody(asked.settings, said), ...extra };
    await streamAnswer(server, body, message, control.signal, () => drawing.ask(), (text) => answering === control && showProgress(text));
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
  for (const name of ["#new", "#new-short"]) find(name).addEventListener("click", openNew);
  find("#search").addEventListener("input", showList);
  find("#import").addEventListener("click", () => find("#import-chooser").click());
  find("#import-chooser").addEventListener("change", async (event) => {
    await importConversations(event.target.files);
    event.target.value = "";
  });
  find("#snippets").addEventListener("click", () => {
    showSnippets(requestBody(conversation.settings, wireMessages(conversation.messages)), Boolean(server.key));
  });
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
