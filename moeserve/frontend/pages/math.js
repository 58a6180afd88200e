// Mathematics as models write it, in LaTeX's notation, turned into MathML nodes. What is not understood stays text.
// The time is linear in the length of the text.

const MATHML = "http://www.w3.org/1998/Math/MathML";
const MAX_LENGTH = 8000;
const MAX_DEPTH = 40;

const letters = (text) => text.trim().split(/\s+/);
const table = (text) => new Map(text.trim().split(/\s+/).map((pair) => [pair.slice(0, -[...pair].at(-1).length), [...pair].at(-1)]));

// Commands that are one letter or sign; the sign is the last character of each word.
const NAMES = table(`alphaα betaβ gammaγ deltaδ epsilonϵ varepsilonε zetaζ etaη thetaθ varthetaϑ iotaι kappaκ lambdaλ muμ
  nuν xiξ piπ varpiϖ rhoρ varrhoϱ sigmaσ varsigmaς tauτ upsilonυ phiϕ varphiφ chiχ psiψ omegaω GammaΓ DeltaΔ ThetaΘ LambdaΛ
  XiΞ PiΠ SigmaΣ UpsilonΥ PhiΦ PsiΨ OmegaΩ infty∞ partial∂ nabla∇ hbarℏ ellℓ Reℜ Imℑ alephℵ emptyset∅ varnothing∅ forall∀
  exists∃ nexists∄ top⊤ bot⊥ angle∠ triangle△ square□ blacksquare■ dagger† degree° checkmark✓ imathı jmathȷ wp℘
  diamond⋄ star⋆ prime′`);
const SIGNS = table(`times× div÷ cdot⋅ ast∗ pm± mp∓ oplus⊕ ominus⊖ otimes⊗ odot⊙ cap∩ cup∪ setminus∖ wedge∧ vee∨ land∧ lor∨
  neg¬ lnot¬ le≤ leq≤ ge≥ geq≥ ll≪ gg≫ ne≠ neq≠ equiv≡ approx≈ sim∼ simeq≃ cong≅ propto∝ in∈ notin∉ ni∋ subset⊂
  supset⊃ subseteq⊆ supseteq⊇ subsetneq⊊ mid∣ nmid∤ parallel∥ perp⊥ to→ rightarrow→ gets← leftarrow← leftrightarrow↔
  Rightarrow⇒ implies⟹ Leftarrow⇐ Leftrightarrow⇔ iff⟺ longrightarrow⟶ longleftarrow⟵ mapsto↦ longmapsto⟼ hookrightarrow↪ uparrow↑
  downarrow↓ Uparrow⇑ Downarrow⇓ nearrow↗ searrow↘ rightharpoonup⇀ rightleftharpoons⇌ circ∘ bullet∙ colon: vdash⊢ models⊨
  therefore∴ because∵ ldots… dots… cdots⋯ vdots⋮ ddots⋱ langle⟨ rangle⟩ lceil⌈ rceil⌉ lfloor⌊ rfloor⌋ lvert| rvert| vert|
  lVert‖ rVert‖ Vert‖ backslash∖ prec≺ succ≻ preceq⪯ succeq⪰ triangleq≜ doteq≐ coloneqq≔ asymp≍ leqslant⩽ geqslant⩾ sqcup⊔ sqcap⊓`);
const LARGE = table("sum∑ prod∏ coprod∐ int∫ iint∬ iiint∭ oint∮ bigcup⋃ bigcap⋂ bigoplus⨁ bigotimes⨂ bigvee⋁ bigwedge⋀");
const INTEGRALS = new Set([..."∫∬∭∮"]);
const FUNCTIONS = new Set(letters(`sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth log ln lg exp det dim ker deg
  gcd hom arg Pr`));
const LIMITS = new Set(letters("lim max min sup inf limsup liminf argmax argmin"));
const ACCENTS = table("hat^ widehat^ bar¯ overline‾ vec→ overrightarrow→ tilde~ widetilde~ dot˙ ddot¨ checkˇ breve˘ acute´ grave` overleftarrow← overbrace⏞");
const UNDER = table("underline_ underbrace⏟");
const SPACES = { ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, "!": -0.17, " ": 0.28, quad: 1, qquad: 2, thinspace: 0.17, enspace: 0.5 };
const TEXTS = new Set(letters("text textrm textbf textit texttt textsf textnormal mbox hbox"));
const UPRIGHT = new Set(letters("mathrm operatorname mathsf mathtt mathup rm"));
// By the command of an alphabet: where its capitals and its small letters begin, and the ones that are elsewhere.
const ALPHABETS = {
  mathbb: [0x1d538, 0x1d552, { C: "ℂ", H: "ℍ", N: "ℕ", P: "ℙ", Q: "ℚ", R: "ℝ", Z: "ℤ" }],
  mathcal: [0x1d49c, 0x1d4b6, { B: "ℬ", E: "ℰ", F: "ℱ", H: "ℋ", I: "ℐ", L: "ℒ", M: "ℳ", R: "ℛ", e: "ℯ", g: "ℊ", o: "ℴ" }],
  mathfrak: [0x1d504, 0x1d51e, { C: "ℭ", H: "ℌ", I: "ℑ", R: "ℜ", Z: "ℨ" }],
  mathbf: [0x1d400, 0x1d41a, {}],
  mathit: [0x1d434, 0x1d44e, { h: "ℎ" }],
};
Object.assign(ALPHABETS, { mathscr: ALPHABETS.mathcal, boldsymbol: ALPHABETS.mathbf, bm: ALPHABETS.mathbf, Bbb: ALPHABETS.mathbb });
const FENCES = { matrix: "", smallmatrix: "", pmatrix: "()", bmatrix: "[]", Bmatrix: "{}", vmatrix: "||", Vmatrix: "‖‖" };
const ALIGNED = new Set(letters("align aligned align* alignat split eqnarray eqnarray*"));
const GATHERED = new Set(letters("gather gathered gather* equation equation* multline multline*"));
const SIZES = new Set(letters("big Big bigg Bigg bigl bigr Bigl Bigr biggl biggr Biggl Biggr bigm Bigm"));
// Commands that change nothing here.
const PASSED = new Set(letters("displaystyle textstyle limits nolimits nonumber notag mathstrut allowbreak left. right."));

const TOKEN = /\\(?:[a-zA-Z]+\*?|[^])|[\s]+|%[^\n]*|[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?|[0-9]+(?:\.[0-9]+)?|[^]/gu;

class Unreadable extends Error {}

function node(tag, attributes, ...children) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes ?? {})) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** The MathML of a formula, or null for one that is not understood. display: on a line of its own. */
export function renderMath(source, display) {
  if (source.length > MAX_LENGTH) return null;
  try {
    const reader = new Reader(source);
    const content = reader.row(() => reader.done);
    return node("math", { display: display ? "block" : "inline" }, content);
  } catch (error) {
    if (error instanceof Unreadable) return null;
    throw error;
  }
}

class Reader {
  constructor(source) {
    this.tokens = (source.match(TOKEN) ?? []).filter((token) => !token.startsWith("%"));
    this.at = 0;
    this.depth = 0;
  }

  get done() {
    this.skip();
    return this.at >= this.tokens.length;
  }

  skip() {
    while (this.at < this.tokens.length && !this.tokens[this.at].trim()) this.at += 1;
  }

  peek() {
    this.skip();
    return this.tokens[this.at];
  }

  take() {
    const token = this.peek();
    if (token === undefined) throw new Unreadable();
    this.at += 1;
    return token;
  }

  expect(wanted) {
    if (this.take() !== wanted) throw new Unreadable();
  }

  /** Atoms up to where `ends`, as one node. */
  row(ends) {
    if (++this.depth > MAX_DEPTH) throw new Unreadable();
    const parts = [];
    while (!ends()) {
      if (this.done) throw new Unreadable();
      const part = this.scripted();
      if (part) parts.push(part);
    }
    this.depth -= 1;
    return parts.length === 1 ? parts[0] : node("mrow", {}, ...parts);
  }

  /** An atom with what stands above and below it. */
  scripted() {
    const base = this.atom();
    let sub = null;
    let sup = null;
    for (;;) {
      const token = this.peek();
      if (token === "_" && !sub) sub = (this.take(), this.argument());
      else if (token === "^" && !sup) sup = (this.take(), this.argument());
      else if (token === "'" && !sup) {
        let primes = "";
        while (this.peek() === "'") primes += (this.take(), "′");
        sup = node("mo", {}, primes);
        if (this.peek() === "^") sup = node("mrow", {}, sup, (this.take(), this.argument()));
      } else if (token === "\\limits" || token === "\\nolimits") this.take();
      else break;
    }
    if (!sub && !sup) return base;
    const held = base ?? node("mrow");
    const stacked = held.hasAttribute("movablelimits") || held.hasAttribute("data-limits");
    const tags = stacked ? ["munder", "mover", "munderover"] : ["msub", "msup", "msubsup"];
    if (sub && sup) return node(tags[2], {}, held, sub, sup);
    return sub ? node(tags[0], {}, held, sub) : node(tags[1], {}, held, sup);
  }

  /** A group in braces, or the next atom. */
  argument() {
    if (this.peek() !== "{") return this.one() ?? node("mrow");
    this.take();
    return this.group();
  }

  /** One digit, letter or command, as it stands behind a mark without braces. */
  one() {
    const token = this.peek();
    if (token && /^[0-9]{2,}/.test(token)) {
      this.tokens.splice(this.at, 1, token[0], token.slice(1));
    }
    return this.atom();
  }

  group() {
    const content = this.row(() => this.peek() === "}");
    this.expect("}");
    return content;
  }

  /** The text of a group as it was written. */
  text() {
    if (this.peek() !== "{") return this.take();
    this.take();
    let open = 1;
    let found = "";
    while (this.at < this.tokens.length) {
      const token = this.tokens[this.at++];
      if (token === "{") open += 1;
      if (token === "}" && !--open) return found;
      found += /^\\[^a-zA-Z]$/.test(token) ? token[1] : token;
    }
    throw new Unreadable();
  }

  atom() {
    const token = this.take();
    if (token === "{") return this.group();
    if (token === "}" || token === "&") throw new Unreadable();
    if (token === "_" || token === "^") {
      this.at -= 1;
      return null;
    }
    if (token[0] === "\\" && token.length > 1) return this.command(token.slice(1));
    if (/^[0-9]/.test(token)) return node("mn", {}, token);
    if (/^\p{L}/u.test(token)) return node("mi", {}, token);
    if (token === "~") return node("mspace", { width: "0.28em" });
    return node("mo", "()[]|".includes(token) ? { stretchy: "false" } : {}, token === "-" ? "−" : token === "*" ? "∗" : token);
  }

  command(name) {
    if (NAMES.has(name)) return node("mi", {}, NAMES.get(name));
    if (SIGNS.has(name)) return node("mo", { stretchy: "false" }, SIGNS.get(name));
    if (LARGE.has(name)) {
      const sign = LARGE.get(name);
      return node("mo", INTEGRALS.has(sign) ? { largeop: "true" } : { largeop: "true", movablelimits: "true" }, sign);
    }
    if (LIMITS.has(name)) return node("mo", { movablelimits: "true", form: "prefix" }, name);
    if (FUNCTIONS.has(name)) return node("mi", {}, name);
    if (name in SPACES) return node("mspace", { width: `${SPACES[name]}em` });
    if (ACCENTS.has(name)) return this.over(ACCENTS.get(name), name);
    if (UNDER.has(name)) return node("munder", { "data-limits": "" }, this.argument(), node("mo", {}, UNDER.get(name)));
    if (TEXTS.has(name)) return node("mtext", {}, this.text());
    if (UPRIGHT.has(name.replace("*", ""))) return node("mi", { mathvariant: "normal" }, this.text());
    if (name in ALPHABETS) return this.inAlphabet(ALPHABETS[name]);
    if (SIZES.has(name)) return this.delimiter();
    if (PASSED.has(name)) return null;
    if (/^[{}$%&#_|]$/.test(name)) return node("mo", { stretchy: "false" }, name === "|" ? "‖" : name);
    return this.structure(name);
  }

  structure(name) {
    switch (name) {
      case "frac":
      case "dfrac":
      case "tfrac":
      case "cfrac":
        return node("mfrac", {}, this.argument(), this.argument());
      case "binom":
      case "dbinom":
        return node("mrow", {}, node("mo", {}, "("), node("mfrac", { linethickness: "0" }, this.argument(), this.argument()), node("mo", {}, ")"));
      case "sqrt":
        return this.root();
      case "left":
        return this.fenced();
      case "not":
        return node("mo", {}, `${this.atom()?.textContent ?? ""}\u0338`);
      case "boxed":
        return node("mrow", { class: "boxed" }, this.argument());
      case "overset":
      case "stackrel": {
        const above = this.argument();
        return node("mover", {}, this.argument(), above);
      }
      case "underset": {
        const below = this.argument();
        return node("munder", {}, this.argument(), below);
      }
      case "substack": {
        this.expect("{");
        const rows = this.rows(() => this.peek() === "}", {});
        this.expect("}");
        return rows;
      }
      case "pmod":
        return node("mrow", {}, node("mo", {}, "("), node("mi", {}, "mod"), node("mspace", { width: "0.28em" }), this.argument(), node("mo", {}, ")"));
      case "bmod":
      case "mod":
        return node("mo", {}, "mod");
      case "tag":
      case "tag*":
        return node("mtext", {}, `\u2003(${this.text()})`);
      case "begin":
        return this.environment(this.text());
      case "color":
      case "label":
        this.text();
        return null;
      case "phantom":
        return node("mphantom", {}, this.argument());
      default:
        throw new Unreadable();
    }
  }

  over(sign, name) {
    const base = this.argument();
    return node("mover", name === "overbrace" ? { "data-limits": "" } : { accent: "true" }, base, node("mo", { stretchy: String(/^over|^wide/.test(name)) }, sign));
  }

  inAlphabet([capitals, small, others]) {
    const written = this.text().trim();
    if (written.startsWith("\\")) return node("mi", { class: "bold" }, NAMES.get(written.slice(1)) ?? written);
    const shown = [...written].map((letter) => {
      if (others[letter]) return others[letter];
      if (/[A-Z]/.test(letter)) return String.fromCodePoint(capitals + letter.charCodeAt(0) - 65);
      if (/[a-z]/.test(letter)) return String.fromCodePoint(small + letter.charCodeAt(0) - 97);
      return letter;
    });
    return node("mi", {}, shown.join(""));
  }

  root() {
    let degree = null;
    if (this.peek() === "[") {
      this.take();
      degree = this.row(() => this.peek() === "]");
      this.expect("]");
    }
    const content = this.argument();
    return degree ? node("mroot", {}, content, degree) : node("msqrt", {}, content);
  }

  /** A bracket of any size. */
  delimiter() {
    const token = this.take();
    const name = token.slice(1);
    const sign = token[0] === "\\" && token.length > 1 ? (SIGNS.get(name) ?? (name === "|" ? "‖" : name)) : token;
    return node("mo", { stretchy: "true" }, sign === "." ? "" : sign);
  }

  fenced() {
    const open = this.delimiter();
    const parts = [open];
    while (this.peek() !== "\\right") {
      if (this.peek() === "\\middle") {
        this.take();
        parts.push(this.delimiter());
      } else parts.push(this.row(() => ["\\right", "\\middle"].includes(this.peek())));
    }
    this.take();
    return node("mrow", {}, ...parts, this.delimiter());
  }

  environment(name) {
    const ends = () => this.peek() === "\\end";
    const close = () => {
      this.take();
      if (this.text() !== name) throw new Unreadable();
    };
    if (name === "array") this.text();
    if (name === "alignat") this.text();
    const sides = ALIGNED.has(name) ? "aligned" : name === "cases" ? "cases" : "";
    if (!(name in FENCES || name === "array" || name === "cases" || sides || GATHERED.has(name))) throw new Unreadable();
    const rows = this.rows(ends, sides ? { class: sides } : {});
    close();
    if (name === "cases") return node("mrow", {}, node("mo", { stretchy: "true" }, "{"), rows);
    const fences = FENCES[name];
    return fences ? node("mrow", {}, node("mo", {}, fences[0]), rows, node("mo", {}, fences[1])) : rows;
  }

  /** Cells between `&`, rows between `\\`. */
  rows(ends, attributes) {
    const rows = [[]];
    const cellEnds = () => ends() || ["&", "\\\\", "\\cr"].includes(this.peek());
    for (;;) {
      while (this.peek() === "\\hline") this.take();
      rows.at(-1).push(node("mtd", {}, this.row(cellEnds)));
      if (ends()) break;
      if (this.take() === "&") continue;
      if (this.peek() === "[") while (this.take() !== "]");
      if (ends()) break;
      rows.push([]);
    }
    return node("mtable", attributes, ...rows.map((cells) => node("mtr", {}, ...cells)));
  }
}
