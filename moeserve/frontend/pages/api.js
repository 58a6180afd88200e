// Requests to the server with the key that this browser keeps, and the events of its streams.

import { el } from "./dom.js";

export class ApiError extends Error {
  constructor(status, message, code = null) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

/** `slots` are names in localStorage: the key is written to the first and read from the first that has one. */
export class Server {
  constructor(slots) {
    this.slots = slots;
    this.asking = null;
  }

  get key() {
    return this.slots.map((slot) => localStorage.getItem(slot)).find(Boolean) ?? "";
  }

  set key(key) {
    if (key) localStorage.setItem(this.slots[0], key);
    else for (const slot of this.slots) localStorage.removeItem(slot);
  }

  /** The response; asks for a key where one is needed, and tries again. Throws ApiError. */
  async request(path, { method = "GET", body, signal, ask = true } = {}) {
    const key = this.key;
    const headers = {};
    if (key) headers.authorization = `Bearer ${key}`;
    if (body !== undefined) headers["content-type"] = "application/json";
    const content = body === undefined ? undefined : JSON.stringify(body);
    let response;
    try {
      response = await fetch(path, { method, headers, body: content, signal, cache: "no-store" });
    } catch (error) {
      if (error.name === "AbortError") throw error;
      // Also a key that no header can hold.
      throw new ApiError(0, `The server does not answer (${error.message}).`);
    }
    if (response.ok) return response;
    if (response.status === 401 && ask && (await this.askForKey(key ? "The server refuses this key." : ""))) {
      return this.request(path, { method, body, signal, ask });
    }
    throw await readError(response);
  }

  async json(path, options) {
    return (await this.request(path, options)).json();
  }

  /** Asks the person for a key, once however many requests wait for it. Resolves to whether one was given. */
  askForKey(reason = "") {
    this.asking ??= keyDialog(reason, this.key).then((key) => {
      this.asking = null;
      if (key !== null) this.key = key;
      return key !== null;
    });
    return this.asking;
  }
}

async function readError(response) {
  try {
    const { error } = await response.json();
    return new ApiError(response.status, error.message, error.code);
  } catch {
    return new ApiError(response.status, `The server answered ${response.status}.`);
  }
}

/** The key, or null if the dialog was left. */
function keyDialog(reason, key) {
  const input = el("input", {
    id: "api-key",
    type: "password",
    autocomplete: "off",
    spellcheck: "false",
    "aria-describedby": "api-key-about",
  });
  input.value = key;
  const form = el(
    "form",
    { method: "dialog" },
    el("h2", {}, "API key"),
    el("p", { id: "api-key-about" }, reason, reason && " ", "It is kept in this browser and sent to this server alone."),
    el("label", { for: "api-key" }, "Key"),
    input,
    el(
      "div",
      { class: "actions" },
      el("button", { type: "submit", value: "cancel", class: "quiet", formnovalidate: true }, "Cancel"),
      el("button", { type: "submit", value: "save", class: "primary" }, "Use this key"),
    ),
  );
  const dialog = document.body.appendChild(el("dialog", { class: "key-dialog", "aria-label": "API key" }, form));
  // Enter in the field chooses the first submit button, which is Cancel.
  input.addEventListener("keydown", (event) => {
    if (event.key === "Enter") {
      event.preventDefault();
      dialog.close("save");
    }
  });
  return new Promise((resolve) => {
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "save" ? input.value.trim() : null);
    });
    dialog.showModal();
    input.focus();
  });
}

/** The events of a response as {event, data}, data as text. */
export async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const event = readEvent(part);
        if (event.data !== null) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

function readEvent(text) {
  let event = "message";
  let data = null;
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) event = line.slice(6).trim();
    else if (line.startsWith("data:")) data = (data === null ? "" : data + "\n") + line.slice(5).replace(/^ /, "");
  }
  return { event, data };
}
