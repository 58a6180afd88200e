// The settings of a conversation, their form, and the request that they make.

import { find } from "./dom.js";

// Name in the request, and what the field takes. An empty field leaves it to the model.
const NUMBERS = {
  temperature: parseFloat,
  top_p: parseFloat,
  top_k: parseInt,
  min_p: parseFloat,
  max_tokens: parseInt,
  presence_penalty: parseFloat,
  frequency_penalty: parseFloat,
  repetition_penalty: parseFloat,
  seed: parseInt,
};

export const NOTHING_SET = { system: "", model: "", stop: "", tools: "", ...Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, ""])) };

/** The form in the drawer. `changed` is called with the settings whenever they are valid. */
export class SettingsForm {
  constructor(changed) {
    this.form = find("#settings-form");
    this.dialog = find("#settings");
    this.form.addEventListener("input", () => {
      if (this.check()) changed(this.read());
    });
    find("#settings-open").addEventListener("click", () => this.dialog.showModal());
    find("#settings-reset").addEventListener("click", () => {
      this.show({ ...NOTHING_SET, model: this.read().model });
      changed(this.read());
    });
    // A click beside the drawer closes it.
    this.dialog.addEventListener("click", (event) => {
      if (event.target === this.dialog) this.dialog.close();
    });
  }

  show(settings) {
    for (const name of Object.keys(NOTHING_SET)) this.form.elements[name].value = settings[name] ?? "";
    this.check();
  }

  showModels(names) {
    this.form.elements.model.replaceChildren(...names.map((name) => new Option(name, name)));
  }

  read() {
    return Object.fromEntries(Object.keys(NOTHING_SET).map((name) => [name, this.form.elements[name].value]));
  }

  /** Whether all fields are valid; says of the tools why they are not. */
  check() {
    const field = this.form.elements.tools;
    const reason = whyNoTools(field.value);
    field.setCustomValidity(reason);
    field.setAttribute("aria-invalid", String(Boolean(reason)));
    find("#tools-problem").textContent = reason;
    return this.form.checkValidity();
  }
}

function whyNoTools(text) {
  if (!text.trim()) return "";
  try {
    return Array.isArray(JSON.parse(text)) ? "" : "This must be a list: [ … ]";
  } catch (error) {
    return `This is no JSON: ${error.message}`;
  }
}

/** The body of a chat request. messages: in the API's form. */
export function requestBody(settings, messages) {
  const system = settings.system?.trim() ? [{ role: "system", content: settings.system }] : [];
  const body = {
    model: settings.model,
    messages: [...system, ...messages],
    stream: true,
    stream_options: { include_usage: true, continuous_usage_stats: true },
    return_progress: true,
  };
  for (const [name, parse] of Object.entries(NUMBERS)) {
    const text = settings[name] ?? "";
    if (text !== "") body[name] = parse(text, 10);
  }
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.tools?.trim()) {
    const tools = JSON.parse(settings.tools);
    if (tools.length) body.tools = tools;
  }
  return body;
}
