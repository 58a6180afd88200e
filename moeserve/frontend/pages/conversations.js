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

function titleOf(text) {
  const line = text.trim().split("\n", 1)[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1).trimEnd()}…` : line || UNTITLED;
}

/** crypto.randomUUID is missing where the page comes over plain HTTP from another machine. */
function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
