// Colours for code: comments, strings, numbers and keywords, in a span each. No language is parsed.
// The time is linear in the length of the text.

import { el } from "./dom.js";

const words = (text) => new Set(text.trim().split(/\s+/));
const C_WORDS = `if else for while do switch case default break continue return goto struct union enum typedef static const
  void int char long short float double signed unsigned sizeof extern inline volatile class public private protected virtual
  template typename namespace using new delete this throw try catch operator friend auto nullptr true false bool override
  final import package extends implements interface abstract instanceof super null fn let mut pub impl trait match use mod
  crate self Self where async await move dyn ref unsafe func var go defer chan select range map type nil fallthrough record
  sealed permits fun val when is in out object companion data lateinit guard protocol extension`;
const LANGUAGES = {
  python: {
    comment: "#",
    triple: true,
    words: words(`and as assert async await break class continue def del elif else except finally for from global if import in
      is lambda match nonlocal not or pass raise return try while with yield case True False None self`),
  },
  script: {
    comment: "//",
    block: true,
    ticks: true,
    words: words(`${C_WORDS} function of export default typeof delete yield get set undefined readonly declare keyof satisfies`),
  },
  c: { comment: "//", block: true, words: words(C_WORDS) },
  shell: {
    comment: "#",
    words: words(`if then else elif fi for in do done while until case esac function return local export set unset echo cd exit
      source sudo`),
  },
  data: { comment: "#", words: words("true false null yes no on off") },
  sql: {
    comment: "--",
    block: true,
    anyCase: true,
    words: words(`select from where and or not null is in as on join left right inner outer full group by order having limit
      offset insert into values update set delete create table index view drop alter add primary key foreign references
      unique default distinct union all case when then else end with exists between like asc desc begin commit`),
  },
  ruby: {
    comment: "#",
    words: words(`def end if elsif else unless while until for do begin rescue ensure class module return yield self nil true
      false and or not in case when then require attr_accessor puts`),
  },
  lua: { comment: "--", words: words("and break do else elseif end false for function if in local nil not or repeat return then true until while") },
  markup: { markup: true },
  diff: { lines: true },
};
const NAMES = {
  python: "python py python3 pyi",
  script: "javascript js jsx mjs typescript ts tsx json json5 jsonc",
  c: "c h cpp c++ cc hpp cuda java c# cs csharp go golang rust rs swift kotlin kt scala dart php css scss less proto zig",
  shell: "bash sh shell zsh fish console dockerfile makefile make nginx powershell",
  data: "yaml yml toml ini conf cfg env properties r",
  sql: "sql postgresql mysql sqlite",
  ruby: "ruby rb elixir ex",
  lua: "lua haskell hs",
  markup: "html xml svg vue xhtml",
  diff: "diff patch",
};
const BY_NAME = new Map(Object.entries(NAMES).flatMap(([kind, names]) => names.split(" ").map((name) => [name, LANGUAGES[kind]])));
const MAX_LENGTH = 200_000;

/** The nodes of code in a language as it is named behind a fence; plain text for a language that is not known. */
export function highlight(code, name) {
  const language = BY_NAME.get(name.toLowerCase());
  if (!language || code.length > MAX_LENGTH) return [code];
  if (language.lines) return byLine(code);
  const out = new Spans();
  const pattern = language.markup ? MARKUP : patternOf(language);
  pattern.lastIndex = 0;
  for (const found of code.matchAll(pattern)) out.put(kindOf(found.groups, language), found[0]);
  return out.nodes();
}

const escaped = (text) => text.replace(/[/*]/g, "\\$&");
const MARKUP = /(?<comment><!--[^]*?(?:-->|$))|(?<word><\/?[\w:-]+|\/?>)|(?<string>(?<==)(?:"[^"<>]*"|'[^'<>]*'))|(?<rest>[^<>="'/]+|[^])/g;

function patternOf(language) {
  if (language.pattern) return language.pattern;
  const comments = [`${escaped(language.comment)}[^\\n]*`];
  if (language.block) comments.push("\\/\\*[^]*?(?:\\*\\/|$)");
  const strings = ['"(?:[^"\\\\\\n]|\\\\[^])*"?', "'(?:[^'\\\\\\n]|\\\\[^])*'?"];
  if (language.triple) strings.unshift('"""[^]*?(?:"""|$)', "'''[^]*?(?:'''|$)");
  if (language.ticks) strings.push("`(?:[^`\\\\]|\\\\[^])*`?");
  const parts = [
    `(?<comment>${comments.join("|")})`,
    `(?<string>${strings.join("|")})`,
    "(?<number>\\b(?:0[xXbBoO][\\da-fA-F_]+|\\d[\\d_]*(?:\\.\\d+)?(?:[eE][+-]?\\d+)?)\\b)",
    "(?<word>[\\p{L}_$@][\\p{L}\\p{N}_$]*)",
    "(?<rest>\\s+|[^])",
  ];
  return (language.pattern = new RegExp(parts.join("|"), "gu"));
}

function kindOf({ comment, string, number, word }, language) {
  if (comment) return "comment";
  if (string) return "string";
  if (number) return "number";
  if (word && (language.markup || language.words.has(language.anyCase ? word.toLowerCase() : word))) return "keyword";
  return "";
}

function byLine(code) {
  const out = new Spans();
  for (const line of code.split(/(?<=\n)/)) out.put({ "+": "added", "-": "removed", "@": "number" }[line[0]] ?? "", line);
  return out.nodes();
}

/** Nodes of texts by kind; neighbours of one kind are one node. */
class Spans {
  constructor() {
    this.found = [];
    this.kind = "";
    this.text = "";
  }

  put(kind, text) {
    if (kind !== this.kind) this.flush();
    this.kind = kind;
    this.text += text;
  }

  flush() {
    if (this.text) this.found.push(this.kind ? el("span", { class: `code-${this.kind}` }, this.text) : this.text);
    this.text = "";
  }

  nodes() {
    this.flush();
    return this.found;
  }
}
