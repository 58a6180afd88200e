// Conversations, kept in this browser: one entry of localStorage each, and one with their titles.

const INDEX = "moeserve.conversations";
const PREFIX = "moeserve.conversation.";
const TITLE_LENGTH = 60;
const UNTITLED = "New conversation";

export class Conversations {
  /** Titles and ids, the latest first. */
  list() {
    return read(INDEX, []).sort((one, other) => other.updated - one.updated);
  }

  /** A conversation that is not saved yet. */
  create(settings) {
    const now = Date.now();
    return { id: newId(), title: UNTITLED, created: now, updated: now, settings: { ...settings }, messages: [] };
  }

  get(id) {
    return read(PREFIX + id, null);
  }

  /** Throws where the browser's room is full. An untitled conversation is named by its first question. */
  save(conversation, now = Date.now()) {
    const question = conversation.messages.find((message) => message.role === "user");
    if (conversation.title === UNTITLED && question) conversation.title = titleOf(question.content);
    conversation.updated = now;
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    const { id, title, updated } = conversation;
    const others = this.list().filter((entry) => entry.id !== id);
    localStorage.setItem(INDEX, JSON.stringify([{ id, title, updated }, ...others]));
  }

  /** Titles and ids of the conversations in which all words of a text occur. */
  search(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    if (!words.length) return this.list();
    return this.list().filter(({ id, title }) => {
      const all = `${title}\n${(this.get(id)?.messages ?? []).map(({ content }) => content).join("\n")}`.toLowerCase();
      return words.every((word) => all.includes(word));
    });
  }

  /** A conversation of an exported text, under an id of its own. Throws where the text holds none. */
  read(text, settings) {
    const found = JSON.parse(text);
    const messages = (Array.isArray(found) ? found : found?.messages)?.map(readMessage);
    if (!messages?.length) throw new Error("it holds no messages");
    const system = messages[0].role === "system" ? messages.shift().content : "";
    const title = typeof found.title === "string" ? found.title.slice(0, 120) : UNTITLED;
    const own = Object.entries(found.settings ?? {}).filter(([name, value]) => name in settings && typeof value === "string");
    return { ...this.create({ ...settings, ...(system && { system }), ...Object.fromEntries(own) }), title, messages };
  }

  remove(id) {
    localStorage.removeItem(PREFIX + id);
    localStorage.setItem(INDEX, JSON.stringify(this.list().filter((entry) => entry.id !== id)));
  }

  /** Calls back when another tab has changed something. */
  onForeignChange(callback) {
    window.addEventListener("storage", (event) => {
      if (event.key === INDEX) callback();
    });
  }
}

function read(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(name)) ?? otherwise;
  } catch {
    return otherwise;
  }
}

const isText = (value) => typeof value === "string";
// By the field of a message that an imported one may have beside role and content: whether a value can be shown.
const FIELDS = {
  reasoning: isText,
  tool_call_id: isText,
  name: isText,
  tool_calls: (calls) => Array.isArray(calls) && calls.every((call) => isText(call?.function?.name) && isText(call.function.arguments)),
  files: (files) => Array.isArray(files) && files.every((file) => isText(file?.name) && isText(file.text)),
};

function readMessage(message) {
  const { role, content } = message ?? {};
  if (!["system", "user", "assistant", "tool"].includes(role) || !isText(content ?? "")) {
    throw new Error("a message in it has no role or is no text");
  }
  const rest = Object.entries(FIELDS).filter(([name, fits]) => fits(message[name]));
  return { role, content: content ?? "", ...Object.fromEntries(rest.map(([name]) => [name, message[name]])) };
}

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line || UNTITLED;
}

/** crypto.randomUUID is missing where the page comes over plain HTTP from another machine. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
