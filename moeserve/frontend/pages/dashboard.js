// The dashboard: figures every second from the stream, experts and prefixes every few seconds.

import { ApiError, Server, readEvents } from "./api.js";
import { LineChart, ShareBar } from "./charts.js";
import { button, count, duration, el, find, milliseconds, notify, period } from "./dom.js";
import { ExpertPanel } from "./experts.js";
import { KeyPanel, RequestPanel } from "./keys.js";
import { PrefixPanel } from "./prefixes.js";

const KEPT = 300;
const SPANS_S = { minutes: 300, hour: 3600 };
const STALE_MS = 5000;
const SLOW_EVERY_MS = 5000;
const RETRY_MS = 2000;

const server = new Server(["moeserve.dashboard-key", "moeserve.key"]);
const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
const perSecond = (rate) => (rate < 10 ? rate.toFixed(1) : count(rate));
const known = (value, format) => (value === null ? "–" : format(value));

// By the tile's id: its chart, the values of a sample for it, and what its two lines of text say.
const TILES = {
  requests: {
    chart: new LineChart(["running", "waiting"], count),
    values: (sample) => [sample.running, sample.waiting],
    big: (sample) => count(sample.running),
    small: (sample) => `${count(sample.waiting)} waiting`,
  },
  generation: {
    chart: new LineChart(["tokens per second"], perSecond),
    values: (sample) => [sample.generation_rate],
    big: (sample) => perSecond(sample.generation_rate),
    small: (sample) => `step ${known(sample.step_seconds, milliseconds)}`,
  },
  prompts: {
    chart: new LineChart(["admitted", "from the cache"], perSecond),
    values: (sample) => [sample.prompt_rate, sample.cached_rate],
    big: (sample) => perSecond(sample.prompt_rate),
    small: (sample) => `${perSecond(sample.cached_rate)} from the cache`,
  },
  ttft: {
    chart: new LineChart(["p50", "p95"], milliseconds),
    values: (sample) => [sample.ttft?.p50 ?? null, sample.ttft?.p95 ?? null],
    big: (sample) => known(sample.ttft?.p50 ?? null, milliseconds),
    small: (sample) => `p95 ${known(sample.ttft?.p95 ?? null, milliseconds)}`,
  },
  inter: {
    chart: new LineChart(["p50", "p95"], milliseconds),
    values: (sample) => [sample.inter_token?.p50 ?? null, sample.inter_token?.p95 ?? null],
    big: (sample) => known(sample.inter_token?.p50 ?? null, milliseconds),
    small: (sample) => `p95 ${known(sample.inter_token?.p95 ?? null, milliseconds)}`,
  },
  hits: {
    chart: new LineChart(["hit rate"], percent),
    values: (sample) => [sample.hit_rate],
    big: (sample) => known(sample.hit_rate, percent),
    small: () => "of prompt tokens",
  },
  queue: {
    chart: new LineChart(["p50", "p95"], milliseconds),
    values: (sample) => [sample.queue?.p50 ?? null, sample.queue?.p95 ?? null],
    big: (sample) => known(sample.queue?.p50 ?? null, milliseconds),
    small: (sample) => `p95 ${known(sample.queue?.p95 ?? null, milliseconds)}`,
  },
  faults: {
    chart: new LineChart(["refused", "failed"], perSecond),
    values: (sample) => [sample.refused_rate ?? 0, sample.failed_rate ?? 0],
    big: (sample) => perSecond(sample.refused_rate ?? 0),
    small: (sample) => `${perSecond(sample.failed_rate ?? 0)} failed/min`,
  },
  drafts: {
    chart: new LineChart(["verified", "accepted"], perSecond),
    values: (sample) => [sample.drafts?.verified_rate ?? null, sample.drafts?.accepted_rate ?? null],
    big: (sample) => known(sample.drafts?.accepted_rate ?? null, perSecond),
    small: (sample) => `of ${known(sample.drafts?.verified_rate ?? null, perSecond)} verified`,
    isThere: (sample) => Boolean(sample.drafts),
  },
};

const kv = new ShareBar([["in use", "leased"], ["cached, evictable", "cached"], ["free", "free"]]);
const experts = new ExpertPanel();
const keys = new KeyPanel();
const requests = new RequestPanel(server, () => refreshSlow());
const prefixes = new PrefixPanel((path, body, method = "POST") => act(path, body, method));
let about = {};
let samples = [];
let hour = []; // Fewer samples, of the latest hour.
let shown = "minutes";
let lastEvent = 0;

function showAll() {
  const sample = samples.at(-1);
  const rows = shown === "hour" ? [...hour, ...(sample ? [sample] : [])] : samples;
  for (const [id, tile] of Object.entries(TILES)) {
    tile.chart.update(rows.map((each) => [each.time, ...tile.values(each)]), SPANS_S[shown]);
    if (!sample) continue;
    find(`#${id}`).hidden = tile.isThere ? !tile.isThere(sample) : false;
    find(`#${id} .big`).textContent = tile.big(sample);
    find(`#${id} .small`).textContent = tile.small(sample);
  }
  find("#tiles").classList.toggle("by-threes", !find("#drafts").hidden);
  if (!sample) return;
  showBlocks(sample);
  showService(sample);
  showPrompts(sample);
}

/** How the service is, in a line. */
function showService(sample) {
  const gb = (bytes) => `${(bytes / 1e9).toFixed(1)} GB`;
  const parts = about.kv_bytes ? ` (weights ${gb(about.weights_bytes)}, KV up to ${gb(about.kv_bytes)})` : "";
  const facts = [
    about.started && `up ${period(sample.time - about.started)}`,
    `${count(sample.restarts ?? 0)} restarts`,
    sample.memory_bytes && `${gb(sample.memory_bytes)} of memory${parts}`,
    `${count(sample.rejections)} refused`,
    `${count(sample.preemptions)} preempted`,
  ];
  find("#service").textContent = facts.filter(Boolean).join(" · ");
}

/** How far prompts are, and what the latest one found cached. */
function showPrompts({ prompts, latest_prompt: latest, saved_seconds: saved }) {
  find("#prompts-now").hidden = !prompts && !latest;
  find("#computing").hidden = !prompts;
  if (prompts) {
    const done = prompts.tokens - prompts.left;
    Object.assign(find("#computing progress"), { max: prompts.tokens, value: done });
    const many = prompts.requests > 1 ? ` of ${count(prompts.requests)} prompts` : "";
    find("#computing span").textContent = `${count(done)} of ${count(prompts.tokens)} (${count(prompts.cached)} cached)${many} · ${duration(prompts.seconds_left)} left`;
  }
  const savings = saved ? ` · the cache has saved ${duration(saved)} today` : "";
  find("#latest-prompt").textContent = latest ? `Latest prompt: ${count(latest.cached)} of ${count(latest.tokens)} cached, ${milliseconds(latest.seconds)}${savings}` : "";
}

function showBlocks(sample) {
  const { free, cached, leased } = sample.kv;
  const size = about.block_size ?? 1;
  const text = (blocks) => `${count(blocks)} (${count(blocks * size)} tokens)`;
  kv.update([leased, cached, free], [leased, cached, free].map(text));
  find("#kv-used").textContent = percent(leased / (leased + cached + free || 1));
  find("#kv-below").textContent = sample.below.map((tier) => below(tier, size)).join(", ");
}

function below({ tier, blocks, bytes, unused_for_s: unused, hit_share: share }, size) {
  const found = share === null ? "" : ` · ${percent(share)} of the cached tokens found`;
  const where = tier === "host" ? "in host memory" : "on disk";
  return `${where} ${count(blocks * size)} tokens (${count(bytes / 1e6)} MB) · unused for ${period(unused)} at most${found}`;
}

function showAbout() {
  const facts = [about.models?.[0], about.device, about.dtype, about.max_model_len && `${count(about.max_model_len)} tokens of context`];
  find("#about").textContent = facts.filter(Boolean).join(" · ");
  find("#version").textContent = about.version ?? "";
  const settings = Object.entries(about.settings ?? {});
  find("#settings").hidden = !settings.length;
  const text = (value) => (typeof value === "string" ? value : JSON.stringify(value));
  find("#settings dl").replaceChildren(
    ...settings.map(([name, value]) => el("div", {}, el("dt", {}, name.replaceAll("_", "-")), el("dd", {}, text(value)))),
  );
  document.title = `${about.models?.[0] ?? "Dashboard"} · moeserve`;
}

function showState(text, kind) {
  const state = find("#state");
  if (state.textContent === text) return;
  state.textContent = text;
  state.className = `state ${kind}`;
}

/** Why there are no figures: a service that sleeps counts nothing. */
async function showSilence() {
  const status = await fetch("/ready").then((answer) => answer.json(), () => ({}));
  showState(status.status === "asleep" ? "asleep" : "no news", "waiting");
}

function refused(error, again) {
  const needsOther = error instanceof ApiError && (error.status === 401 || error.status === 403);
  find("#refusal-text").textContent = error.message;
  find("#refusal").hidden = !needsOther;
  find("#refusal-key").replaceChildren(button("Use another key", async () => (await server.askForKey()) && again(), { class: "primary" }));
  return needsOther;
}

async function follow() {
  for (;;) {
    try {
      const response = await server.request("/v1/stats/stream");
      find("#refusal").hidden = true;
      for await (const { event, data } of readEvents(response)) take(event, JSON.parse(data));
      showState("connecting again", "waiting");
    } catch (error) {
      if (refused(error, follow)) {
        showState("no access", "down");
        return;
      }
      showState("connecting again", "down");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
  }
}

function take(event, content) {
  lastEvent = performance.now();
  if (event === "stats") {
    about = content.about;
    samples = content.samples;
    hour = content.hour ?? [];
    showAbout();
    refreshSlow();
  } else if (event === "hour") {
    hour = [...hour.slice(1 - KEPT), content];
  } else {
    samples = [...samples.slice(1 - KEPT), content];
  }
  if (!document.hidden) showAll();
  showState(about.ready ? "live" : "the model is loading", about.ready ? "live" : "waiting");
}

/** Experts and prefixes. A panel that has nothing to show says why. */
async function refreshSlow() {
  if (document.hidden || !lastEvent) return;
  await Promise.all([
    refresh(() => server.json("/v1/requests", { ask: false }), "#open", (described) => requests.show(described)),
    refresh(() => server.json("/v1/usage", { ask: false }), "#keys", (described) => keys.show(described)),
    refresh(() => server.json("/v1/experts", { ask: false }), "#experts", (described) => experts.show(described)),
    refresh(askForPrefixes, "#prefixes", (described) => prefixes.show(described)),
  ]);
}

/** Carries out what a person wants of the prefix cache. */
async function act(path, body, method) {
  try {
    await server.json(path, { method, body });
  } catch (error) {
    notify(error.message);
  }
  refreshSlow();
}

/** The whole tree; its own prefixes for a key without the role admin. */
async function askForPrefixes() {
  try {
    return await server.json("/v1/cache?all=1", { ask: false });
  } catch (error) {
    if (error.status !== 403) throw error;
    return server.json("/v1/cache", { ask: false });
  }
}

async function refresh(ask, panel, show) {
  const problem = find(`${panel} .absent`);
  const content = find(`${panel} .content`);
  try {
    const described = await ask();
    content.hidden = false;
    problem.textContent = "";
    show(described);
  } catch (error) {
    content.hidden = true;
    problem.textContent = error.status === 404 && error.code === "not_found" ? "Not available in this service." : error.message;
  }
}

function listen() {
  for (const [id, tile] of Object.entries(TILES)) find(`#${id}`).append(tile.chart.root);
  find("#kv").append(kv.root);
  for (const input of document.querySelectorAll("[name=span]")) {
    input.addEventListener("change", () => ((shown = input.value), showAll()));
  }
  // A map that was folded has no width to be drawn in.
  find("#experts details").addEventListener("toggle", refreshSlow);
  find("#key").addEventListener("click", async () => (await server.askForKey()) && location.reload());
  document.addEventListener("visibilitychange", () => !document.hidden && (showAll(), refreshSlow()));
  setInterval(() => {
    if (lastEvent && performance.now() - lastEvent > STALE_MS) showSilence();
  }, 1000);
  setInterval(refreshSlow, SLOW_EVERY_MS);
}

listen();
showAll();
follow().catch((error) => notify(error.message));
