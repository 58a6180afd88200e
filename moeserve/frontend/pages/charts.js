// Charts of our own: a line over the latest minutes and a bar of shares, drawn with SVG.

import { el, svg } from "./dom.js";

const WIDTH = 300;
const HEIGHT = 56;

/**
 * A line chart of one or two series with one scale.
 * names: of the series; format: a value as text.
 */
export class LineChart {
  constructor(names, format) {
    this.names = names;
    this.format = format;
    this.paths = names.map((_, place) => svg("path", { class: `line line-${place + 1}` }));
    this.area = svg("path", { class: "area" });
    this.cursor = svg("line", { class: "cursor", y1: 0, y2: HEIGHT, visibility: "hidden" });
    this.svg = svg(
      "svg",
      { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", role: "img" },
      svg("line", { x1: 0, x2: WIDTH, y1: HEIGHT - 0.5, y2: HEIGHT - 0.5, class: "base" }),
      this.area,
      this.paths,
      this.cursor,
    );
    this.reading = el("span", { class: "reading" });
    this.axis = el("div", { class: "axis", "aria-hidden": "true" });
    this.root = el("div", { class: "chart" }, this.svg, this.axis, this.reading);
    this.rows = [];
    this.svg.addEventListener("pointermove", (event) => this.read(event));
    this.svg.addEventListener("pointerleave", () => this.read(null));
  }

  /** rows: [time, ...values], values null where there was nothing. span: seconds that the width shows. */
  update(rows, span) {
    this.rows = rows;
    const values = rows.flatMap((row) => row.slice(1)).filter((value) => value !== null);
    const most = Math.max(...values, 0) || 1;
    const end = rows.at(-1)?.[0] ?? 0;
    this.place = (time) => WIDTH - ((end - time) / span) * WIDTH;
    const height = (value) => HEIGHT - 2 - (value / most) * (HEIGHT - 6);
    this.paths.forEach((path, series) => path.setAttribute("d", lineOf(rows, series + 1, this.place, height)));
    this.area.setAttribute("d", areaOf(rows, this.place, height));
    this.svg.setAttribute("aria-label", this.inWords(rows, most, span));
    const clock = (ago) => new Date((end - ago) * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
    this.axis.replaceChildren(...(end ? [span, span / 2, 0] : []).map((ago) => el("span", {}, clock(ago))));
    this.most = values.some((value) => value > 0) ? most : null;
    this.read(null);
  }

  inWords(rows, most, span) {
    const last = rows.at(-1);
    const now = this.names.map((name, series) => `${name} ${this.show(last?.[series + 1] ?? null)}`).join(", ");
    return `Now ${now}; at most ${this.format(most)} in the latest ${Math.round(span)} seconds`;
  }

  show(value) {
    return value === null ? "–" : this.format(value);
  }

  read(event) {
    if (!event) {
      this.cursor.setAttribute("visibility", "hidden");
      this.reading.textContent = this.most === null ? "" : `max ${this.format(this.most)}`;
      return;
    }
    const box = this.svg.getBoundingClientRect();
    const x = ((event.clientX - box.left) / box.width) * WIDTH;
    const near = this.rows.reduce((best, row) => (Math.abs(this.place(row[0]) - x) < Math.abs(this.place(best[0]) - x) ? row : best), this.rows[0]);
    if (!near) return;
    const place = this.place(near[0]);
    this.cursor.setAttribute("x1", place);
    this.cursor.setAttribute("x2", place);
    this.cursor.setAttribute("visibility", "visible");
    const time = new Date(near[0] * 1000).toLocaleTimeString();
    this.reading.textContent = `${time}  ${near.slice(1).map((value) => this.show(value)).join(" · ")}`;
  }
}

function lineOf(rows, column, place, height) {
  let pen = "M";
  let path = "";
  for (const row of rows) {
    if (row[column] === null) {
      pen = "M";
      continue;
    }
    path += `${pen}${place(row[0]).toFixed(1)} ${height(row[column]).toFixed(1)}`;
    pen = "L";
  }
  return path;
}

function areaOf(rows, place, height) {
  const known = rows.filter((row) => row[1] !== null);
  if (known.length < 2 || known.length < rows.length) return "";
  return `${lineOf(known, 1, place, height)}L${place(known.at(-1)[0]).toFixed(1)} ${HEIGHT}L${place(known[0][0]).toFixed(1)} ${HEIGHT}Z`;
}

/** A bar whose parts are shares of a whole, with a legend. parts: [name, class]. */
export class ShareBar {
  constructor(parts) {
    this.segments = parts.map(([, kind]) => svg("rect", { y: 0, height: 10, class: kind }));
    this.labels = parts.map(([name, kind]) => {
      const value = el("strong");
      return { name, value, item: el("li", {}, el("span", { class: `swatch ${kind}` }), name, " ", value) };
    });
    this.svg = svg("svg", { viewBox: "0 0 100 10", preserveAspectRatio: "none", role: "img" }, this.segments);
    this.root = el("div", { class: "shares" }, this.svg, el("ul", {}, this.labels.map((label) => label.item)));
  }

  /** amounts: in the order of the parts; texts: how they read. */
  update(amounts, texts) {
    const whole = amounts.reduce((sum, amount) => sum + amount, 0) || 1;
    let at = 0;
    amounts.forEach((amount, place) => {
      const width = (100 * amount) / whole;
      this.segments[place].setAttribute("x", at);
      this.segments[place].setAttribute("width", width);
      this.labels[place].value.textContent = texts[place];
      at += width;
    });
    this.svg.setAttribute("aria-label", this.labels.map(({ name }, place) => `${name} ${texts[place]}`).join(", "));
  }
}
