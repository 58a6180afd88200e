// Markdown as models write it, turned into nodes. HTML in it stays text, links lead to http, https and mailto alone.
// The time is linear in the length of the text, whatever it holds.

import { button, copy, el } from "./dom.js";
import { highlight } from "./highlight.js";
import { renderMath } from "./math.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})(?:\s+(.*?))?\s*#*\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( {0,7})([-*+]|\d{1,9}[.)])(?:\s+|$)/;
const DIVIDER = /^ {0,3}\|?\s*:?-+:?\s*(?:\|\s*:?-+:?\s*)*\|?\s*$/;
const LANGUAGE = /^[\w+#.-]{1,24}/;
const MAX_DEPTH = 12;
const MATH_ENDS = { "$$": "$$", "\\[": "\\]" };
const LONGEST_INLINE_MATH = 1000;

/** Shows a text that grows: blocks that did not change keep their nodes. */
export class MarkdownView {
  constructor() {
    this.root = el("div", { class: "markdown" });
    this.sources = [];
  }

  update(text) {
    const blocks = splitBlocks(text.split("\n"));
    let same = 0;
    while (same < blocks.length && same < this.sources.length && blocks[same].source === this.sources[same]) same += 1;
    while (this.root.childNodes.length > same) this.root.lastChild.remove();
    for (const block of blocks.slice(same)) this.root.append(render(block, 0));
    this.sources = blocks.map((block) => block.source);
  }
}

/** The blocks of lines: {kind, lines, source, ...}. */
export function splitBlocks(lines) {
  const blocks = [];
  const math = new MathBlocks(lines);
  let at = 0;
  while (at < lines.length) {
    if (!lines[at].trim()) {
      at += 1;
      continue;
    }
    const block = readBlock(lines, at, math);
    block.source = lines.slice(at, block.end).join("\n");
    blocks.push(block);
    at = block.end;
  }
  return blocks;
}

/** The formulas that stand on lines of their own. They have no blank line inside. */
class MathBlocks {
  constructor(lines) {
    this.lines = lines;
    this.noEndBefore = {};
  }

  /** The block that begins in a line, null for none. */
  read(at) {
    const line = this.lines[at].trim();
    const begin = line.slice(0, 2);
    const close = MATH_ENDS[begin];
    if (!close || at < (this.noEndBefore[close] ?? 0)) return null;
    let end = at;
    let last = line.slice(2);
    while (!last.trimEnd().endsWith(close)) {
      end += 1;
      last = this.lines[end] ?? "";
      if (!last.trim()) {
        this.noEndBefore[close] = end;
        return null;
      }
    }
    const text = [line.slice(2), ...this.lines.slice(at + 1, end + 1)].join("\n").trimEnd().slice(0, -2);
    return { kind: "math", text, end: end + 1 };
  }
}

function readBlock(lines, at, math) {
  const formula = math.read(at);
  if (formula) return formula;
  const line = lines[at];
  const fence = FENCE.exec(line);
  if (fence) return readCode(lines, at, fence);
  const heading = HEADING.exec(line);
  if (heading) return { kind: "heading", level: heading[1].length, text: heading[2] ?? "", end: at + 1 };
  if (RULE.test(line)) return { kind: "rule", end: at + 1 };
  if (QUOTE.test(line)) return readQuote(lines, at);
  if (ITEM.test(line)) return readList(lines, at);
  if (isTable(lines, at)) return readTable(lines, at);
  return readParagraph(lines, at, math);
}

function readCode(lines, at, fence) {
  const closing = new RegExp(`^ {0,3}${fence[1][0]}{${fence[1].length},}\\s*$`);
  let end = at + 1;
  while (end < lines.length && !closing.test(lines[end])) end += 1;
  const language = LANGUAGE.exec(fence[2].trim())?.[0] ?? "";
  return { kind: "code", language, text: lines.slice(at + 1, end).join("\n"), end: Math.min(end + 1, lines.length) };
}

function readQuote(lines, at) {
  let end = at;
  while (end < lines.length && QUOTE.test(lines[end])) end += 1;
  return { kind: "quote", lines: lines.slice(at, end).map((line) => line.replace(QUOTE, "")), end };
}

function readList(lines, at) {
  const [, , mark] = ITEM.exec(lines[at]);
  const ordered = /\d/.test(mark);
  const items = [];
  let end = at;
  while (end < lines.length) {
    const found = ITEM.exec(lines[end]);
    if (!found || /\d/.test(found[2]) !== ordered || RULE.test(lines[end])) break;
    const inside = Math.min(found[0].length, found[1].length + found[2].length + 4);
    const item = [lines[end].slice(found[0].length)];
    end += 1;
    while (end < lines.length && belongs(lines, end, inside, found[1].length)) {
      item.push(dedent(lines[end], inside));
      end += 1;
    }
    items.push(item);
    // A blank line between two items does not end the list.
    if (end + 1 < lines.length && !lines[end].trim() && ITEM.test(lines[end + 1])) end += 1;
  }
  return { kind: "list", ordered, start: parseInt(mark, 10), items, end };
}

/** Whether a line goes on with an item whose text begins in column `inside` and whose mark is in column `outside`. */
function belongs(lines, at, inside, outside) {
  const line = lines[at];
  if (!line.trim()) return at + 1 < lines.length && indent(lines[at + 1]) > outside && lines[at + 1].trim() !== "";
  if (indent(line) >= Math.min(inside, outside + 2)) return true;
  const lazy = !ITEM.test(line) && !FENCE.test(line) && !HEADING.test(line) && !QUOTE.test(line) && !RULE.test(line);
  return lazy && lines[at - 1].trim() !== "";
}

function indent(line) {
  return line.length - line.trimStart().length;
}

function dedent(line, columns) {
  return line.slice(Math.min(columns, indent(line)));
}

function isTable(lines, at) {
  return at + 1 < lines.length && lines[at].includes("|") && lines[at + 1].includes("-") && DIVIDER.test(lines[at + 1]);
}

function readTable(lines, at) {
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|") && lines[end].trim()) end += 1;
  const [head, divider, ...rows] = lines.slice(at, end).map(cells);
  const sides = divider.map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : "left"));
  return { kind: "table", head, sides, rows, end };
}

function cells(line) {
  const text = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return text.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function readParagraph(lines, at, math) {
  let end = at + 1;
  while (end < lines.length && lines[end].trim() && !interrupts(lines, end) && !math.read(end)) end += 1;
  return { kind: "paragraph", text: lines.slice(at, end).join("\n"), end };
}

function interrupts(lines, at) {
  const line = lines[at];
  if (FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line)) return true;
  const item = ITEM.exec(line);
  return (item !== null && item[0].length < line.length && /^(?:[-*+]|1[.)])$/.test(item[2])) || isTable(lines, at);
}

function renderAll(lines, depth) {
  if (depth >= MAX_DEPTH) return [el("p", {}, lines.join("\n"))];
  return splitBlocks(lines).map((block) => render(block, depth));
}

function render(block, depth) {
  switch (block.kind) {
    case "code":
      return renderCode(block);
    case "heading":
      // The page's own headings are the first and the second level.
      return el(`h${Math.min(block.level + 2, 6)}`, { class: `level-${block.level}` }, inline(block.text));
    case "math":
      return el("div", { class: "formula", tabindex: "0" }, formula(block.text, true));
    case "rule":
      return el("hr");
    case "quote":
      return el("blockquote", {}, renderAll(block.lines, depth + 1));
    case "list":
      return renderList(block, depth);
    case "table":
      return renderTable(block);
    default:
      return el("p", {}, inline(block.text));
  }
}

/** A formula; what cannot be drawn is shown as it was written. */
function formula(source, display) {
  return renderMath(source, display) ?? el("code", { class: "math" }, source.trim());
}

function renderCode(block) {
  const copying = button("Copy", () => copy(block.text, copying), { class: "quiet" });
  return el(
    "figure",
    { class: "code" },
    el("figcaption", {}, el("span", {}, block.language || "text"), copying),
    el("pre", { tabindex: "0" }, el("code", {}, highlight(block.text, block.language))),
  );
}

function renderList(block, depth) {
  const items = block.items.map((lines) => {
    const task = /^\[([ xX])\]\s+/.exec(lines[0]);
    const rest = task ? [lines[0].slice(task[0].length), ...lines.slice(1)] : lines;
    const content = renderAll(rest, depth + 1);
    // A tight item has no paragraph around its text.
    const first = content[0]?.tagName === "P" ? [...content.shift().childNodes] : [];
    return el("li", { class: task && "task" }, task ? (task[1] === " " ? "☐ " : "☑ ") : null, first, content);
  });
  const attributes = block.ordered && block.start !== 1 ? { start: block.start } : {};
  return el(block.ordered ? "ol" : "ul", attributes, items);
}

function renderTable(block) {
  const row = (tag, texts) =>
    el("tr", {}, block.head.map((_, place) => el(tag, { class: `to-${block.sides[place] ?? "left"}` }, inline(texts[place] ?? ""))));
  return el(
    "div",
    { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", block.head)), el("tbody", {}, block.rows.map((texts) => row("td", texts)))),
  );
}

const SPAN = /\[((?:[^[\]\\\n]|\\.){1,400})\]\(\s*<?([^\s<>()]{1,2000}(?:\([^\s()]{0,200}\)[^\s<>()]{0,2000})?)>?(?:\s+"[^"\n]{0,200}")?\s*\)/y;
const ADDRESS = /https?:\/\/[^\s<>"'`[\]{}|\\^]{1,2000}/y;
const MARKS = { "***": ["strong", "em"], "**": ["strong"], __: ["strong"], "~~": ["del"], "*": ["em"], _: ["em"] };

/** Nodes of a text with emphasis, code, links and line breaks. */
export function inline(text, depth = 0) {
  const out = [];
  let plain = "";
  // Marks that do not occur again: they are not searched for once more.
  const absent = new Set();
  const flush = () => {
    if (plain) out.push(plain);
    plain = "";
  };
  const put = (node) => (flush(), out.push(node));
  let at = 0;
  while (at < text.length) {
    const found = depth < MAX_DEPTH ? readSpan(text, at, depth, absent) : null;
    if (found) {
      if (typeof found.node === "string") plain += found.node;
      else put(found.node);
      at = found.end;
    } else if (text[at] === "\n") {
      if (plain.endsWith("  ") || plain.endsWith("\\")) plain = plain.replace(/( {2,}|\\)$/, "");
      put(el("br"));
      at += 1;
    } else {
      plain += text[at];
      at += 1;
    }
  }
  flush();
  return out;
}

function readSpan(text, at, depth, absent) {
  switch (text[at]) {
    case "$":
      return readMath(text, at, text[at + 1] === "$" ? "$$" : "$", absent);
    case "\\":
      if (text[at + 1] === "(" || text[at + 1] === "[") {
        const found = readMath(text, at, text[at + 1] === "(" ? "\\)" : "\\]", absent);
        if (found) return found;
      }
      return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { node: text[at + 1], end: at + 2 } : null;
    case "`":
      return readCodeSpan(text, at, absent);
    case "!":
      return text[at + 1] === "[" ? readLink(text, at + 1, depth) : null;
    case "[":
      return readLink(text, at, depth);
    case "h":
      return /\w/.test(text[at - 1] ?? "") ? null : readAddress(text, at);
    case "*":
    case "_":
    case "~":
      return readEmphasis(text, at, depth, absent);
    default:
      return null;
  }
}

function readCodeSpan(text, at, absent) {
  let length = 1;
  while (text[at + length] === "`") length += 1;
  const ticks = "`".repeat(length);
  const run = { node: ticks, end: at + length };
  if (absent.has(ticks)) return run;
  let end = text.indexOf(ticks, at + length);
  while (end >= 0 && text[end + length] === "`") {
    let past = end + length;
    while (text[past] === "`") past += 1;
    end = text.indexOf(ticks, past);
  }
  if (end < 0) {
    absent.add(ticks);
    return run;
  }
  const inner = text.slice(at + length, end);
  const shown = /^ .*[^ ].* $/s.test(inner) ? inner.slice(1, -1) : inner;
  return { node: el("code", {}, shown), end: end + length };
}

/**
 * A formula in a line of text: `$…$`, `$$…$$`, `\\(…\\)` or `\\[…\\]`. Amounts of money are none: a `$` that begins one has no
 * space behind it, one that ends it none before it and no digit behind it.
 */
function readMath(text, at, close, absent) {
  if (absent.has(close)) return null;
  const begin = at + (close === "$" ? 1 : 2);
  const isDollar = close === "$";
  if (isDollar && /\s/.test(text[begin] ?? " ")) return null;
  let end = text.indexOf(close, begin);
  if (end < 0) {
    absent.add(close);
    return null;
  }
  const last = begin + LONGEST_INLINE_MATH;
  while (isDollar && end >= 0 && end <= last && text[end - 1] === "\\") end = text.indexOf(close, end + 1);
  if (isDollar && (/\s/.test(text[end - 1]) || /\d/.test(text[end + 1] ?? ""))) return null;
  if (end < 0 || end > last || end === begin) return null;
  return { node: formula(text.slice(begin, end), !isDollar && close !== "\\)"), end: end + close.length };
}

function readLink(text, at, depth) {
  SPAN.lastIndex = at;
  const found = SPAN.exec(text);
  const link = found && anchor(found[2], inline(found[1], depth + 1));
  return link ? { node: link, end: SPAN.lastIndex } : null;
}

function readAddress(text, at) {
  ADDRESS.lastIndex = at;
  const found = ADDRESS.exec(text)?.[0].replace(/[.,;:!?*_~]+$/, "");
  const address = found && (found.includes("(") ? found : found.replace(/\)+$/, ""));
  const link = address && anchor(address, [address]);
  return link ? { node: link, end: at + address.length } : null;
}

function anchor(address, content) {
  let url;
  try {
    url = new URL(address);
  } catch {
    return null;
  }
  if (!["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return el("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, content);
}

function readEmphasis(text, at, depth, absent) {
  let length = 1;
  while (text[at + length] === text[at]) length += 1;
  const mark = text.slice(at, at + Math.min(length, text[at] === "*" ? 3 : 2));
  const skip = { node: text.slice(at, at + length), end: at + length };
  const tags = MARKS[mark];
  if (!tags || length > 3 || absent.has(mark) || /\s/.test(text[at + length] ?? " ")) return skip;
  if (mark[0] === "_" && /\w/.test(text[at - 1] ?? "")) return skip;
  const end = closing(text, at + length, mark);
  if (end < 0) {
    absent.add(mark);
    return skip;
  }
  const inner = inline(text.slice(at + length, end), depth + 1);
  const node = tags.reduceRight((content, tag) => [el(tag, {}, content)], inner)[0];
  return { node, end: end + mark.length };
}

/** Where the mark closes: behind no space, no part of a longer run, and `_` before no word. */
function closing(text, from, mark) {
  for (let end = text.indexOf(mark, from); end >= 0; end = text.indexOf(mark, end)) {
    let past = end + mark.length;
    while (text[past] === mark[0]) past += 1;
    const whole = past === end + mark.length || past - end === 3;
    const place = past - mark.length;
    if (whole && end > from && !/\s/.test(text[end - 1]) && (mark[0] !== "_" || !/\w/.test(text[past] ?? ""))) return place;
    end = past;
  }
  return -1;
}
