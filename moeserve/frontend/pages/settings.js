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
  thinking_token_budget: parseInt,
};
// By the name of a field: what holds where a model says nothing.
const NEUTRAL = { temperature: 1, top_p: 1, top_k: "all", min_p: 0, presence_penalty: 0, frequency_penalty: 0, repetition_penalty: 1 };
const NO_THINKING = "none";

export const NOTHING_SET = { system: "", model: "", stop: "", tools: "", thinking: "", ...Object.fromEntries(Object.keys(NUMBERS).map((name) => [name, ""])) };

/** The form in the drawer. `changed` is called with the settings whenever they are valid. */
export class SettingsForm {
  constructor(changed) {
    this.form = find("#settings-form");
    this.dialog = find("#settings");
    this.models = new Map();
    this.form.elements.model.addEventListener("change", () => this.showDefaults());
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
    this.form.elements.model.value = settings.model ?? "";
    this.showDefaults();
    for (const name of Object.keys(NOTHING_SET)) this.form.elements[name].value = settings[name] ?? "";
    this.check();
  }

  /** models: as the server tells them. */
  showModels(models) {
    this.models = new Map(models.map((model) => [model.id, model]));
    this.form.elements.model.replaceChildren(...models.map(({ id }) => new Option(id, id)));
  }

  /** What an empty field means for the chosen model, and whether and how much it can be asked to think. */
  showDefaults() {
    const { elements } = this.form;
    const model = this.models.get(elements.model.value);
    for (const [name, neutral] of Object.entries(NEUTRAL)) {
      const value = model?.default_sampling?.[name];
      elements[name].placeholder = String((name === "top_k" && value === 0 ? null : value) ?? neutral);
    }
    elements.max_tokens.placeholder = model?.default_max_tokens ? `${model.default_max_tokens}` : "what fits";
    const thinking = model?.thinking;
    find("#thinking-settings").hidden = !thinking;
    const efforts = thinking?.efforts.map((effort) => new Option(effort, effort)) ?? [];
    const off = thinking?.can_be_off ? [new Option("off", NO_THINKING)] : [];
    const chosen = elements.thinking.value;
    elements.thinking.replaceChildren(new Option("as the model does", ""), ...off, ...efforts);
    elements.thinking.value = [...elements.thinking.options].some(({ value }) => value === chosen) ? chosen : "";
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
    cache_report: true,
  };
  for (const [name, parse] of Object.entries(NUMBERS)) {
    const text = settings[name] ?? "";
    if (text !== "") body[name] = parse(text, 10);
  }
  if (settings.thinking) body.reasoning_effort = settings.thinking;
  const stop = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.tools?.trim()) {
    const tools = JSON.parse(settings.tools);
    if (tools.length) body.tools = tools;
  }
  return body;
}
