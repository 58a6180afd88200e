// Messages as the conversation shows them: text, folded reasoning, tool calls, what they cost, what one can do with them.

import { fileName } from "./attachments.js";
import { button, copy, count, el, milliseconds } from "./dom.js";
import { MarkdownView } from "./markdown.js";

/** `actions` has edit, regenerate, goOn, turn, sendResults and retry; each is called with the message. */
export class MessageView {
  constructor(message, actions) {
    this.message = message;
    this.actions = actions;
    this.markdown = null;
    this.reasoning = null;
    this.calls = el("div", { class: "calls" });
    this.footer = el("footer");
    this.body = el("div", { class: "body" });
    this.root = el("article", { class: `message ${message.role}`, "aria-label": LABELS[message.role] }, this.body);
    if (message.role === "tool") this.showToolResult();
    else if (message.role === "user") this.showQuestion();
    else this.root.append(this.calls, this.footer);
    if (message.role === "assistant") this.update({ last: false, busy: false });
  }

  showQuestion() {
    const { message, actions } = this;
    const files = (message.files ?? []).map((file) => {
      return el("details", { class: "fold attached" }, el("summary", {}, fileName(file)), el("pre", { tabindex: "0" }, file.text));
    });
    this.body.replaceChildren(...files, el("div", { class: "plain" }, message.content));
    const editing = button("Edit", () => this.editQuestion(), { class: "quiet" });
    this.footer.replaceChildren(...this.versions(), this.copyButton(), editing);
    this.root.append(this.footer);
    this.editQuestion = () => {
      const area = el("textarea", { "aria-label": "Edit the message", rows: Math.min(12, message.content.split("\n").length + 1) });
      area.value = message.content;
      const leave = () => {
        this.showQuestion();
        this.footer.lastChild.focus();
      };
      const send = () => area.value.trim() && actions.edit(message, area.value);
      area.addEventListener("keydown", (event) => {
        if (event.key === "Escape") leave();
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
          event.preventDefault();
          send();
        }
      });
      this.body.replaceChildren(area);
      this.footer.replaceChildren(button("Cancel", leave, { class: "quiet" }), button("Send", send, { class: "primary" }));
      area.focus();
    };
  }

  showToolResult() {
    const summary = el("summary", {}, "Result of ", el("code", {}, this.message.name ?? this.message.tool_call_id));
    this.body.append(el("details", { class: "fold" }, summary, el("pre", { tabindex: "0" }, this.message.content)));
  }

  /** Shows what an answer has by now. last: nothing follows it. busy: it goes on. */
  update({ last, busy }) {
    const { message } = this;
    this.root.setAttribute("aria-busy", String(busy));
    this.showReasoning(busy);
    if (message.content) {
      this.markdown ??= new MarkdownView();
      if (!this.markdown.root.parentNode) this.body.append(this.markdown.root);
      this.markdown.update(message.content);
    }
    const waiting = busy && !message.content && !message.reasoning && !message.tool_calls?.length;
    this.root.classList.toggle("waiting", waiting);
    this.showCalls(last && !busy);
    this.showFooter(last, busy);
  }

  showReasoning(busy) {
    const { message } = this;
    if (!message.reasoning) return;
    if (!this.reasoning) {
      const summary = el("summary");
      const content = el("div", { class: "plain" });
      this.reasoning = { summary, content };
      this.body.prepend(el("details", { class: "fold reasoning" }, summary, content));
    }
    const thinking = busy && !message.content && !message.tool_calls?.length;
    const { thoughts, thought } = message.stats ?? {};
    const facts = [thought && milliseconds(thought), thoughts && `${count(thoughts)} tokens`].filter(Boolean);
    this.reasoning.summary.textContent = ["Reasoning", ...facts].join(" · ") + (thinking ? " …" : "");
    this.reasoning.content.textContent = message.reasoning;
  }

  showCalls(open) {
    const { message } = this;
    const calls = message.tool_calls ?? [];
    if (!calls.length) return;
    const results = new Map();
    const blocks = calls.map((call) => {
      const field = open && el("textarea", { rows: 2, placeholder: "Result of the function", "aria-label": `Result of ${call.function.name}` });
      if (field) results.set(call, field);
      return el(
        "section",
        { class: "call", "aria-label": `Call of ${call.function.name}` },
        el("h3", {}, el("code", {}, call.function.name), el("span", { class: "id" }, call.id)),
        el("pre", { tabindex: "0", class: "arguments" }, pretty(call.function.arguments)),
        field || null,
      );
    });
    const send = () => this.actions.sendResults(message, calls.map((call) => ({ call, content: results.get(call).value })));
    const buttons = open ? [button(calls.length > 1 ? "Send results" : "Send result", send, { class: "primary" })] : [];
    this.calls.replaceChildren(...blocks, ...buttons);
  }

  showFooter(last, busy) {
    const { message, actions } = this;
    const parts = [];
    if (message.error) {
      parts.push(el("p", { class: "problem", role: "alert" }, message.error, " ", button("Try again", () => actions.retry(message))));
    }
    if (!busy) parts.push(...this.versions(), ...costs(message));
    const isCut = message.stopped || message.finish_reason === "length" || message.error;
    if (!busy && last && isCut && message.content && !message.tool_calls?.length) {
      parts.push(button("Continue", () => actions.goOn(message)));
    }
    if (!busy && message.content) parts.push(this.copyButton());
    if (!busy && !message.error) parts.push(button("Regenerate", () => actions.regenerate(message), { class: "quiet" }));
    this.footer.replaceChildren(...parts);
    this.root.classList.toggle("last", last);
  }

  /** The number of the shown version and of all, between arrows to the others. */
  versions() {
    const { versions, version } = this.message;
    if (!versions) return [];
    const arrow = (label, sign, to) => {
      return button(sign, () => this.actions.turn(this.message, to), { class: "quiet arrow", "aria-label": label, disabled: !(to in versions) });
    };
    const place = el("span", { class: "fact" }, `${version + 1}/${versions.length}`);
    return [el("span", { class: "versions" }, arrow("Earlier version", "‹", version - 1), place, arrow("Later version", "›", version + 1))];
  }

  copyButton() {
    const copying = button("Copy", () => copy(this.message.content, copying), { class: "quiet" });
    return copying;
  }
}

const LABELS = { user: "You", assistant: "Answer", tool: "Result of a tool" };

/** Arguments as JSON on several lines; while they are incomplete, as they came. */
function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}

function costs({ stats, stopped, finish_reason: reason }) {
  const parts = [];
  const fact = (text, title) => parts.push(el("span", { class: "fact", title }, text));
  if (stopped) fact("stopped", "You stopped this answer");
  if (reason === "length") fact("cut off", "The answer reached its limit of tokens or the end of the context");
  if (!stats) return parts;
  if (stats.ttft !== null) fact(`TTFT ${milliseconds(stats.ttft)}`, "Time to the first token, as this browser saw it");
  if (stats.rate) fact(`${stats.rate.toFixed(1)} tokens/s`, "Tokens after the first, per second");
  if (stats.tokens) fact(`${count(stats.tokens)} tokens`, "Length of the answer");
  if (stats.cached !== null) {
    const text = `${count(stats.cached)} of ${count(stats.prompt)} cached`;
    const kind = stats.cached ? "badge" : "badge none";
    const why = () => showReport(stats);
    parts.push(
      stats.report
        ? button(text, why, { class: kind, title: "Tokens of the prompt that the prefix cache had: why not more?", "aria-haspopup": "dialog" })
        : el("span", { class: kind, title: "Tokens of the prompt that the prefix cache had" }, text),
    );
  }
  return parts;
}

/** Why the prefix cache had no more of a prompt. */
function showReport({ cached, prompt, report }) {
  const close = button("Close", () => dialog.close(), { class: "quiet" });
  const texts = [["Just before", report.before], ["This prompt", report.yours], ["The nearest", report.nearest]];
  const shown = texts.filter(([, text]) => text).flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, el("code", {}, text))]);
  const dialog = el(
    "dialog",
    { class: "report", "aria-label": "Why the cache had no more" },
    el("header", {}, el("h2", {}, `${count(cached)} of ${count(prompt)} tokens were cached`), close),
    el("p", {}, report.explanation),
    shown.length ? el("dl", {}, shown) : null,
    el("p", { class: "note" }, `The match ended at token ${count(report.at_token)} (${report.reason}).`),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}
