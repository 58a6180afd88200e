// One answer: its stream of events, what has come of it so far, and its figures.

import { readEvents } from "./api.js";
import { count, duration } from "./dom.js";

const PROGRESS_EVERY_MS = 250;

/** A message for an answer that has not begun. */
export function emptyAnswer() {
  return { role: "assistant", content: "", reasoning: "", tool_calls: [], stats: null };
}

/** Asks, and fills the message while the answer comes. changed: is called then; tell: with a line about what has come. */
export async function streamAnswer(server, body, message, signal, changed, tell) {
  const seen = { begin: performance.now(), first: null, last: null, spoke: null, usage: null, prompt: null, told: 0 };
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
        if (message.content || message.tool_calls.length) seen.spoke ??= seen.last;
        changed();
      }
    }
  } finally {
    clearInterval(telling);
    if (seen.first !== null) message.stats = statsOf(seen);
  }
}

/** What has come of an answer, in a line: how far its prompt is, then how many tokens there are and how fast they come. */
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

function statsOf({ begin, first, last, spoke, usage }) {
  const tokens = usage?.completion_tokens ?? 0;
  return {
    ttft: first === null ? null : (first - begin) / 1000,
    rate: tokens > 1 && last > first ? ((tokens - 1) * 1000) / (last - first) : null,
    tokens,
    prompt: usage?.prompt_tokens ?? 0,
    cached: usage?.prompt_tokens_details?.cached_tokens ?? null,
    thoughts: usage?.completion_tokens_details?.reasoning_tokens ?? 0,
    thought: first === null ? null : ((spoke ?? last) - first) / 1000,
    report: usage?.cache_report ?? null,
  };
}

/** The messages in the API's form: without reasoning, with files in the text, and without answers that say nothing. */
export function wireMessages(messages) {
  return messages
    .filter((message) => message.role !== "assistant" || message.content || message.tool_calls?.length)
    .map(({ role, content, files, tool_calls, tool_call_id }) => {
      const plain = { role, content: files?.length ? withFiles(content, files) : content };
      if (tool_calls?.length) Object.assign(plain, { tool_calls, content: content || null });
      return tool_call_id ? { ...plain, tool_call_id } : plain;
    });
}

/** Files come before the question, so that a prompt with another question has them cached. */
function withFiles(content, files) {
  const blocks = files.map(({ name, text }) => {
    const ticks = "`".repeat(Math.max(3, ...(text.match(/`+/g) ?? []).map((run) => run.length + 1)));
    return `${name}\n${ticks}\n${text}${text.endsWith("\n") ? "" : "\n"}${ticks}`;
  });
  return [...blocks, content].filter(Boolean).join("\n\n");
}
