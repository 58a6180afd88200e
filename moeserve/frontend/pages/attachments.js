// Files of text that go with a question: chosen, dropped or pasted.

import { button, count, el, find, notify } from "./dom.js";

const MAX_BYTES = 512 * 1024;
const MAX_FILES = 20;

export class Attachments {
  constructor() {
    this.files = [];
    this.list = find("#files");
    const chooser = find("#file-chooser");
    find("#attach").addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.add(chooser.files);
      chooser.value = "";
    });
    const area = find("#composer");
    for (const kind of ["dragenter", "dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => {
        if (!event.dataTransfer?.types.includes("Files")) return;
        event.preventDefault();
        area.classList.toggle("dropping", kind === "dragenter" || kind === "dragover");
        if (kind === "drop") this.add(event.dataTransfer.files);
      });
    }
    find("#question").addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(chosen) {
    for (const file of chosen) {
      const problem = await this.addOne(file);
      if (problem) notify(problem);
    }
    this.show();
    find("#question").focus();
  }

  /** Why a file cannot go with the question, "" where it can. */
  async addOne(file) {
    if (this.files.length >= MAX_FILES) return `A question takes at most ${MAX_FILES} files.`;
    if (/\.pdf$/i.test(file.name)) return `“${file.name}” is a PDF, whose text is not read here: attach what pdftotext makes of it.`;
    if (file.size > MAX_BYTES) return `“${file.name}” has ${count(file.size / 1024)} KB; a file may have ${MAX_BYTES / 1024}.`;
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) throw new TypeError();
      this.files.push({ name: file.name || "pasted.txt", text });
      return "";
    } catch {
      return `“${file.name}” is no text: models here read text and code.`;
    }
  }

  /** The files so far, which are then forgotten. */
  take() {
    const { files } = this;
    this.files = [];
    this.show();
    return files;
  }

  show() {
    const chips = this.files.map((file, place) => {
      const remove = () => {
        this.files.splice(place, 1);
        this.show();
      };
      return el("li", {}, fileName(file), button("Remove", remove, { class: "quiet", "aria-label": `Remove ${file.name}` }));
    });
    this.list.replaceChildren(...chips);
    this.list.hidden = !chips.length;
  }
}

export function fileName({ name, text }) {
  const lines = text.split("\n").length;
  return el("span", { class: "file" }, name, el("span", { class: "note" }, ` ${count(lines)} ${lines === 1 ? "line" : "lines"}`));
}
