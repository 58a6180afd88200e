// The open conversation as a request: for curl, and for Python's openai package.

import { button, copy, el } from "./dom.js";

// What the page asks for to draw, and a program has no need of.
const OWN_FIELDS = ["stream", "stream_options", "return_progress", "cache_report"];

/** Shows both forms of a request. body: as the page sends it. */
export function showSnippets(body, hasKey) {
  const request = Object.fromEntries(Object.entries(body).filter(([name]) => !OWN_FIELDS.includes(name)));
  const part = (name, text) => {
    const copying = button("Copy", () => copy(text, copying), { class: "quiet" });
    return el("figure", { class: "code" }, el("figcaption", {}, el("span", {}, name), copying), el("pre", { tabindex: "0" }, el("code", {}, text)));
  };
  const close = button("Close", () => dialog.close(), { class: "quiet" });
  const dialog = el(
    "dialog",
    { class: "snippets", "aria-label": "This conversation as a request" },
    el("header", {}, el("h2", {}, "This conversation as a request"), close),
    part("curl", curlOf(request, hasKey)),
    part("Python", pythonOf(request, hasKey)),
    el("p", { class: "note" }, "All routes: ", el("a", { href: "/openapi.json", target: "_blank" }, "openapi.json")),
  );
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

export function curlOf(request, hasKey) {
  const key = hasKey ? ['-H "Authorization: Bearer $MOESERVE_API_KEY"'] : [];
  const data = JSON.stringify(request, null, 2).replaceAll("'", "'\\''");
  const parts = [`curl ${location.origin}/v1/chat/completions`, ...key, "-H 'Content-Type: application/json'", `-d '${data}'`];
  return parts.join(" \\\n  ");
}

// Fields that the package knows by name; it takes all others as `extra_body`.
const KNOWN = new Set(`model messages temperature top_p max_tokens presence_penalty frequency_penalty seed stop tools
  reasoning_effort`.split(/\s+/));

export function pythonOf(request, hasKey) {
  const entries = Object.entries(request);
  const extra = Object.fromEntries(entries.filter(([name]) => !KNOWN.has(name)));
  const lines = entries.filter(([name]) => KNOWN.has(name)).map(([name, value]) => `    ${name}=${literal(value, "    ")},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, "    ")},`);
  const key = hasKey ? 'os.environ["MOESERVE_API_KEY"]' : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url="${location.origin}/v1", api_key=${key})`,
    "answer = client.chat.completions.create(",
    ...lines,
    ")",
    "print(answer.choices[0].message.content)",
  ].join("\n");
}

/** A value as Python writes it. Strings of JSON are strings of Python. */
function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = `${indent}    `;
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const parts = Array.isArray(value)
    ? value.map((each) => literal(each, inner))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, inner)}`);
  return parts.length ? `${open}\n${parts.map((part) => `${inner}${part},`).join("\n")}\n${indent}${close}` : open + close;
}
