// The heat map of the experts: how much work each has had of late, by layer, where it is, and whether it is in memory.

import { LineChart } from "./charts.js";
import { count, el, find, milliseconds } from "./dom.js";

const AXIS = 34;
const HEAD = 14; // above the cells, for the numbers of the columns
const LEAST_ROW = 9;
const MOST_ROW = 22;
const KEPT = 120;
const SHORTEST_SPAN_S = 60;
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;

/** Cells of a description (`GET /v1/experts`), layer by layer, in the order of columns. */
export function heatCells(described, grouping) {
  const ranks = described.placement?.ranks;
  const resident = residentByLayer(described);
  return described.load.map((loads, layer) => {
    const mean = loads.reduce((sum, load) => sum + load, 0) / loads.length || 1;
    const cells = loads.map((load, expert) => ({
      expert,
      ranks: ranks?.[layer]?.[expert] ?? [0],
      share: load / mean,
      resident: resident ? resident[layer].has(expert) : true,
    }));
    if (grouping === "expert") return cells;
    const byRank = Array.from({ length: described.num_ranks }, () => []);
    for (const cell of cells) for (const rank of cell.ranks) byRank[rank].push(cell);
    if (grouping === "placed") return byRank.flatMap((held, rank) => held.map((cell, place) => ({ ...cell, rank, begins: place === 0 && rank > 0 })));
    const perRank = loads.length / described.num_ranks;
    // The load of an expert that several ranks hold is shared by them.
    return byRank.map((held, rank) => ({
      rank,
      share: held.reduce((sum, cell) => sum + cell.share / cell.ranks.length, 0) / perRank,
      resident: true,
      held: held.length,
    }));
  });
}

function residentByLayer(described) {
  const ranks = described.residency?.resident;
  if (!ranks) return null;
  return described.load.map((_, layer) => new Set(ranks.flatMap((layers) => layers[layer] ?? [])));
}

/** Curves of a description and the one before it: a name, the text of a value, and the value, null where there is none. */
const CURVES = [
  ["Balance, worst layer", (share) => share.toFixed(2), (now) => (now.balancedness ? worst(now.balancedness) : null)],
  ["Time waiting for experts", percent, (now, before, seconds) => change(now, before, "stall_seconds", (waited) => waited / seconds)],
  ["Experts in memory when wanted", percent, (now, before) => change(now, before, "hits", (hits) => hits / wanted(now, before))],
];

function change(now, before, name, share) {
  if (!now.residency || !before?.residency) return null;
  const value = share(grown(now, before, name));
  return Number.isFinite(value) && value >= 0 ? value : null;
}

/** How much a counter of the expert memory grew, the mean over ranks. */
function grown(now, before, name) {
  const sum = ({ residency }) => residency[name].reduce((total, value) => total + value, 0) / residency[name].length;
  return sum(now) - sum(before);
}

const wanted = (now, before) => ["hits", "late", "misses"].reduce((sum, name) => sum + grown(now, before, name), 0);

class ExpertCurves {
  constructor() {
    this.tiles = CURVES.map(([name, format]) => {
      const chart = new LineChart([name], format);
      const big = el("span", { class: "big" }, "–");
      const root = el("section", { class: "tile" }, el("h3", {}, name), el("p", {}, big), chart.root);
      return { root, chart, big, rows: [] };
    });
    find("#expert-curves").append(...this.tiles.map(({ root }) => root));
    this.before = null;
  }

  show(described) {
    const time = performance.now() / 1000;
    const { before } = this;
    this.before = { described, time };
    CURVES.forEach(([, format, valueOf], place) => {
      const tile = this.tiles[place];
      const value = valueOf(described, before?.described, time - (before?.time ?? time));
      tile.rows = [...tile.rows.slice(1 - KEPT), [time, value]];
      tile.root.hidden = tile.rows.every((row) => row[1] === null);
      tile.big.textContent = value === null ? "–" : format(value);
      tile.chart.update(tile.rows, Math.max(SHORTEST_SPAN_S, time - tile.rows[0][0]));
    });
  }
}

export class ExpertPanel {
  constructor() {
    this.curves = new ExpertCurves();
    this.canvas = find("#heat");
    this.reading = find("#heat-reading");
    this.facts = find("#expert-facts");
    this.grouping = find("#heat-grouping");
    this.described = null;
    this.rows = [];
    this.chosen = null;
    this.grouping.addEventListener("change", () => (this.choose(null), this.draw()));
    this.canvas.addEventListener("pointermove", (event) => this.choose(this.cellAt(event)));
    this.canvas.addEventListener("pointerleave", () => this.choose(null));
    this.canvas.addEventListener("keydown", (event) => this.move(event));
    new ResizeObserver(() => this.draw()).observe(this.canvas.parentElement);
    document.addEventListener("themechange", () => this.draw());
  }

  show(described) {
    this.described = described;
    this.showFacts(described);
    this.curves.show(described);
    find("#tied").hidden = !described.tied;
    find("#heat-area").hidden = !described.load;
    find("#balance-note").hidden = !described.balancedness;
    for (const part of ["#residency-legend", "#residency-note"]) find(part).hidden = !described.residency;
    this.draw();
  }

  showFacts(described) {
    const { rebalancing, placement, strategy, recording, residency } = described;
    const facts = [
      ["layers", count(described.layers.length)],
      ["experts a layer", count(described.num_experts)],
      ["for a token", count(described.top_k)],
      ["ranks", count(described.num_ranks)],
    ];
    if (recording) facts.push(["tokens counted", count(recording.tokens)]);
    if (residency) facts.push(["in memory", inMemory(described)]);
    if (placement) facts.push(["placement", `no. ${placement.version}`]);
    if (strategy?.prefetch) facts.push(["loads ahead", ahead(strategy.prefetch)]);
    if (rebalancing) facts.push(...migrations(rebalancing, described.layers));
    this.facts.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
  }

  draw() {
    const { described, canvas } = this;
    if (!described?.load) return;
    this.rows = heatCells(described, this.grouping.value);
    const width = canvas.parentElement.clientWidth;
    const rowHeight = Math.max(LEAST_ROW, Math.min(MOST_ROW, Math.floor(420 / this.rows.length)));
    const height = HEAD + this.rows.length * rowHeight;
    const ratio = window.devicePixelRatio || 1;
    canvas.width = width * ratio;
    canvas.height = height * ratio;
    canvas.style.height = `${height}px`;
    this.rowHeight = rowHeight;
    this.cellWidth = (width - AXIS) / Math.max(...this.rows.map((row) => row.length));
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    this.paint(context, coloursOf(canvas));
  }

  paint(context, colours) {
    const { rows, rowHeight, cellWidth, described } = this;
    const most = Math.max(2, ...rows.flat().map((cell) => cell.share));
    const gap = cellWidth > 4 ? 1 : 0;
    context.font = `${Math.min(11, rowHeight)}px system-ui, sans-serif`;
    context.textBaseline = "middle";
    this.paintHead(context, colours);
    context.textAlign = "right";
    const every = Math.ceil(12 / rowHeight);
    rows.forEach((row, layer) => {
      const y = HEAD + layer * rowHeight;
      context.globalAlpha = 1;
      context.fillStyle = colours.muted;
      if (layer % every === 0) context.fillText(String(described.layers[layer]), AXIS - 8, y + rowHeight / 2);
      row.forEach((cell, place) => {
        const x = AXIS + place * cellWidth;
        context.globalAlpha = 0.07 + 0.93 * Math.min(1, cell.share / most);
        context.fillStyle = cell.resident ? colours.accent : colours.second;
        context.fillRect(x, y, cellWidth - gap, rowHeight - 1);
        if (cell.begins) {
          context.globalAlpha = 1;
          context.fillStyle = colours.text;
          context.fillRect(x - 1, y, 1, rowHeight);
        }
      });
    });
    context.globalAlpha = 1;
    if (this.chosen) {
      const [layer, place] = this.chosen;
      context.strokeStyle = colours.text;
      context.strokeRect(AXIS + place * cellWidth - 0.5, HEAD + layer * rowHeight - 0.5, cellWidth, rowHeight);
    }
  }

  /** The numbers of the columns, as many as fit: of experts or ranks, in the order of the first layer. */
  paintHead(context, colours) {
    const { cellWidth } = this;
    context.globalAlpha = 1;
    context.fillStyle = colours.muted;
    context.textAlign = "center";
    const every = Math.ceil(24 / cellWidth);
    // Experts that are placed by rank have another order in each layer.
    if (this.grouping.value === "placed") return;
    this.rows[0].forEach((cell, place) => {
      if (place % every === 0) context.fillText(String(cell.expert ?? cell.rank), AXIS + (place + 0.5) * cellWidth, HEAD / 2);
    });
  }

  cellAt(event) {
    const box = this.canvas.getBoundingClientRect();
    const layer = Math.floor((event.clientY - box.top - HEAD) / this.rowHeight);
    const place = Math.floor((event.clientX - box.left - AXIS) / this.cellWidth);
    return this.rows[layer]?.[place] ? [layer, place] : null;
  }

  move(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (!step || !this.rows.length) return;
    event.preventDefault();
    const [layer, place] = this.chosen ?? [0, 0];
    const next = Math.max(0, Math.min(this.rows.length - 1, layer + step[0]));
    this.choose([next, Math.max(0, Math.min(this.rows[next].length - 1, place + step[1]))]);
  }

  choose(chosen) {
    if (chosen?.join() === this.chosen?.join()) return;
    this.chosen = chosen;
    this.draw();
    this.reading.textContent = chosen ? this.inWords(...chosen) : "";
  }

  inWords(layer, place) {
    const cell = this.rows[layer][place];
    const share = `${cell.share.toFixed(2)} of the mean load`;
    const where = `layer ${this.described.layers[layer]}`;
    if (cell.expert === undefined) return `${where}, rank ${cell.rank}: ${share}, ${count(cell.held)} experts`;
    const ranks = cell.rank === undefined ? cell.ranks.join(" and ") : cell.rank;
    const memory = this.described.residency ? (cell.resident ? ", in memory" : ", not in memory") : "";
    return `${where}, expert ${cell.expert}, rank ${ranks}: ${share}${memory}`;
  }
}

function coloursOf(element) {
  const probe = element.parentElement;
  const of = (name) => getComputedStyle(probe.querySelector(`.colour-${name}`)).color;
  return { accent: of("accent"), second: of("second"), muted: of("muted"), text: of("text") };
}

function worst({ ranks, experts }) {
  return Math.min(...(ranks ?? experts));
}

function inMemory({ residency, num_experts: experts, layers }) {
  const resident = residency.resident.flat(1).reduce((sum, layer) => sum + layer.length, 0);
  return `${count(resident)} of ${count(experts * layers.length)}`;
}

/** What loads ahead, and what that saves of a step with the fewest tokens. */
function ahead({ is_on: isOn, source, saved }) {
  const words = isOn ? source : source === "off" ? "off" : `${source}, off now`;
  if (!saved?.length) return words;
  const { share, rows } = saved[0];
  const verb = share < 0 ? "would cost" : isOn ? "saves" : "saved, when tried,";
  return `${words}; ${verb} ${percent(Math.abs(share))} of a step with ${count(rows)} ${rows === 1 ? "token" : "tokens"}`;
}

function migrations(stats, layers) {
  const facts = [["layers placed anew", count(stats.num_migrations)]];
  if (stats.num_failures) facts.push(["failed", count(stats.num_failures)]);
  if (stats.layer_in_progress !== null) facts.push(["under way", `layer ${layers[stats.layer_in_progress]}`]);
  if (stats.seconds_since_success !== null) facts.push(["last", `${milliseconds(stats.seconds_since_success)} ago`]);
  return facts;
}
