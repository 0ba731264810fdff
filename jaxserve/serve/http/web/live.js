// The live view: takes the server's events, keeps a minute of them, draws.

import { drawPool, drawSteps, drawTimes, duration, expand, readStyle, short } from "./draw.js";
import { events, getKey } from "./sse.js";

const SPAN_MS = 60000;
const KEPT_STEPS = 600;
const RETRY_MS = [1000, 2000, 5000, 10000];
const SILENCE_MS = 10000; // the server sends two events a second
const by = (id) => document.getElementById(id);

let model = "";
let maxLen = 0;
let examples = [];
let seesPictures = null;
let replicas = []; // what was kept of each
let chosen = 0;
let paused = false;
let compiles = 0;
let wake = () => {};
let reading = null;
let onNews = () => {};

// `name` is "", `maxLen` 0 and `seesPictures` null while they are not known. `examples`: questions that the model is known to
// answer.
export const getModel = () => ({ name: model, maxLen, examples, seesPictures });

function setState(state, text) {
  by("state").dataset.state = state;
  by("state-text").textContent = text;
}

function keep(old, news) {
  const kept = old ?? { steps: [], firsts: [], itls: [], tokens: [] };
  kept.steps = [...kept.steps, ...news.steps].slice(-KEPT_STEPS);
  kept.itls = [...kept.itls, ...news.steps.filter((step) => step[6] > 0).map((step) => [step[1], step[6]])];
  kept.firsts = [...kept.firsts, ...news.firsts];
  kept.itls = kept.itls.filter(([t]) => t > news.t - SPAN_MS);
  kept.firsts = kept.firsts.filter(([t]) => t > news.t - SPAN_MS);
  kept.tokens = [...kept.tokens, [news.t, news.new_tokens]].filter(([t]) => t > news.t - 3000);
  kept.news = news;
  return kept;
}

function median(points) {
  const values = points.map((p) => p[1]).sort((a, b) => a - b);
  return values.length ? values[Math.floor(values.length / 2)] : null;
}

const percent = (share) => `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;

const MEANINGS = {
  "tokens/s": "Tokens that were generated in a second, by all requests together, over the last three seconds.",
  "running": "Sequences that have a row in the steps of the model. A request with n answers has n of them.",
  "waiting": "Sequences that wait for a row.",
  "pages held": "Share of the page pool that running sequences hold. A page has room for the keys and values of some tokens.",
  "prefix hits": "Share of the tokens of prompts that were found in the cache, and not computed again.",
  "preemptions": "How often a sequence lost its row and its pages to another, and had to be begun again.",
  "host slots": "Share of the slots of host memory that hold a page which the device gave up.",
  "padding": "Share of the places of the latest steps that no token had: shapes are fixed, and what is left over is filled up.",
  "host share": "Share of the time of the latest steps that the engine worked itself, rather than wait for the device.",
  "steps": "Steps of the model since the server began. Each adds a token or more to every sequence whose prompt is done.",
  "tokens a step": "Tokens that a sequence draws in a step of the model, since the server began: one, and more where drafts or rounds bring more.",
  "drafts accepted": "Share of the drafted tokens that the model drew as well, since the server began. The others cost time, and change nothing.",
  "compiles": "Programs that were compiled after the start. It must stay 0: each makes all requests wait.",
};

function tiles({ news, tokens }) {
  const [begin, end] = [tokens[0], tokens.at(-1)];
  const rate = end[0] > begin[0] ? (end[1] - begin[1]) / ((end[0] - begin[0]) / 1000) : 0;
  const counts = news.counts;
  const all = [["tokens/s", short(rate)]];
  if (counts) {
    const hits = counts.queried_tokens ? counts.hit_tokens / counts.queried_tokens : 0;
    all.push(["running", counts.running], ["waiting", counts.waiting], ["pages held", percent(counts.held_pages / counts.grantable_pages)],
      ["prefix hits", percent(hits)], ["preemptions", counts.preemptions]);
    if (counts.slots) all.push(["host slots", percent(counts.used_slots / counts.slots)]);
  }
  all.push(["padding", percent(news.padding)], ["host share", percent(news.host)], ["steps", short(news.steps_total)],
    ["compiles", compiles, compiles > 0]);
  if (news.decode_tokens > news.decode_rows) all.push(["tokens a step", (news.decode_tokens / news.decode_rows).toFixed(2)]);
  if (news.drafted) all.push(["drafts accepted", percent(news.accepted / news.drafted)]);
  return all;
}

function showTiles(all) {
  const list = by("tiles");
  all.forEach(([name, value, bad], i) => {
    let tile = list.children[i];
    if (!tile) {
      tile = document.createElement("div");
      tile.append(document.createElement("dt"), document.createElement("dd"));
      list.append(tile);
    }
    tile.className = bad ? "bad" : "";
    tile.title = MEANINGS[name];
    tile.children[0].textContent = name;
    tile.children[1].textContent = value;
  });
  while (list.children.length > all.length) list.lastChild.remove();
}

function showPool(counts, pages) {
  if (!counts) {
    by("pool-legend").textContent = "this scheduler does not tell";
    return;
  }
  const states = expand(pages);
  const each = drawPool(by("pool"), states);
  const numbers = [["used", counts.held_pages - counts.shared_pages], ["shared", counts.shared_pages],
    ["cached", counts.cached_pages], ["free", counts.free_pages]];
  if (counts.withheld_pages) numbers.push(["withheld", counts.withheld_pages]);
  const text = numbers.map(([name, count]) => `${count} ${name}`);
  const parts = numbers.map(([name], i) => {
    const entry = document.createElement("span"), swatch = document.createElement("i");
    swatch.className = `k ${name}`;
    entry.append(swatch, text[i]);
    return entry;
  });
  by("pool-legend").replaceChildren(...parts, each > 1 ? `a cell is ${each} pages` : "");
  by("pool").setAttribute("aria-label", `Page pool of ${counts.pages}: ${text.join(", ")}`);
}

// What lies behind the device: each line has a name, how full it is where that is known, and what has happened.
function showTiers(counts) {
  const lines = [];
  if (counts?.slots) {
    lines.push(["host", counts.used_slots / counts.slots, `${counts.used_slots} of ${counts.slots} slots used, pages: `
      + `${counts.saved_pages} saved, ${counts.loaded_pages} loaded, ${counts.skipped_pages} skipped, ${counts.declined_pages} declined`]);
  }
  const pages = Object.entries(counts?.store_pages ?? {});
  if (pages.length) {
    const events = pages.filter(([, number]) => number).map(([event, number]) => `${number} ${event}`);
    if (counts.store_breaks) events.push(`left alone ${counts.store_breaks} times`);
    lines.push(["store", null, `pages: ${events.join(", ") || "none"}`]);
  }
  by("tiers").replaceChildren(...lines.map(([name, share, text]) => {
    const line = document.createElement("div"), title = document.createElement("span"), said = document.createElement("span");
    const bar = document.createElement(share === null ? "span" : "meter");
    if (share !== null) {
      bar.value = share;
      bar.setAttribute("aria-label", `slots used: ${percent(share)}`);
    }
    title.textContent = name;
    said.textContent = text;
    line.append(title, bar, said);
    return line;
  }));
}

function draw() {
  const kept = replicas[chosen];
  if (!kept || by("live").hidden) return;
  const { news, steps, firsts, itls } = kept;
  showTiles(tiles(kept));
  showPool(news.counts, news.pages);
  showTiers(news.counts);
  drawSteps(by("steps"), steps.map(([, , decode, chunks]) => ({ decode, prefill: chunks })));
  const last = steps.at(-1);
  by("step-now").textContent = last
    ? `latest: rows ${last[2] + last[3]}, tokens ${last[2] + last[4]}, slots ${last[5]}` : "";
  drawTimes(by("ttft"), firsts, news.t, SPAN_MS);
  drawTimes(by("itl"), itls, news.t, SPAN_MS);
  const [ttft, itl] = [median(firsts), median(itls)];
  by("ttft-now").textContent = ttft === null ? "none in the last minute" : `median ${duration(ttft)}, last minute`;
  by("itl-now").textContent = itl === null ? "none in the last minute" : `median ${duration(itl)}, last minute`;
}

function take(message) {
  model = message.model;
  maxLen = message.max_len;
  examples = message.examples ?? examples; // in the first message alone
  seesPictures = message.sees_pictures ?? seesPictures;
  delete by("live").dataset.nothing;
  by("model").textContent = model;
  replicas = message.replicas.map((news, k) => keep(replicas[k], news));
  chosen = Math.min(chosen, replicas.length - 1);
  const menu = by("replica");
  by("replica-label").hidden = replicas.length < 2;
  while (menu.options.length < replicas.length) menu.add(new Option());
  menu.options.length = replicas.length;
  message.replicas.forEach(({ alive }, k) => (menu.options[k].text = alive ? `${k}` : `${k}, dead`));
  const dead = message.replicas.filter(({ alive }) => !alive).length;
  const rung = message.replicas.map(({ rung }) => rung).find((one) => one !== "none");
  if (!message.accepting) setState("warn", "draining: no new requests");
  else if (message.stalled_s > 5) setState("bad", `no step for ${message.stalled_s.toFixed(0)} s`);
  else if (dead) setState("warn", `${dead} of ${replicas.length} replicas dead`);
  else if (rung) setState("warn", `degraded: ${rung}`);
  else setState("live", "live");
  compiles = message.compiles;
  if (!paused) draw();
  onNews();
}

async function follow() {
  for (let failures = 0; ; ) {
    const mine = (reading = new AbortController());
    let fresh = true; // a connection begins with all that the server has kept, and it may be another server
    let accepting = true, silent = false, alarm = 0;
    const listen = () => {
      clearTimeout(alarm);
      alarm = setTimeout(() => {
        silent = true;
        mine.abort();
      }, SILENCE_MS);
    };
    try {
      listen();
      for await (const data of events("events", { signal: mine.signal })) {
        listen();
        failures = 0;
        if (fresh) replicas = [];
        fresh = false;
        const message = JSON.parse(data);
        accepting = message.accepting;
        take(message);
      }
      if (accepting) setState("warn", "the server has closed the view"); // or it is draining, and has said so
    } catch (error) {
      if (silent) setState("bad", "the server has fallen silent");
      else if (error.name === "AbortError") continue; // a new key: at once
      else if (error.status === 401) setState("warn", getKey() ? "the API key is not accepted" : "an API key is needed");
      else setState("bad", error.status ? error.message : "the server does not answer");
    } finally {
      clearTimeout(alarm);
    }
    const pause = RETRY_MS[Math.min(failures, RETRY_MS.length - 1)];
    failures += 1;
    await new Promise((resolve) => {
      wake = resolve;
      setTimeout(resolve, pause);
    });
  }
}

// With a new key, say.
export function reconnect() {
  reading?.abort();
  wake();
}

// The meanings of the tiles as a list: a title shows itself to a pointer alone.
function listMeanings() {
  by("meanings").replaceChildren(...Object.entries(MEANINGS).flatMap(([name, meaning]) => {
    const term = document.createElement("dt"), description = document.createElement("dd");
    term.textContent = name;
    description.textContent = meaning;
    return [term, description];
  }));
}

// `toTell` is called after each message of the server.
export function startLive(toTell) {
  onNews = toTell;
  readStyle();
  listMeanings();
  const redraw = () => {
    readStyle();
    draw();
  };
  document.addEventListener("themechange", redraw);
  new ResizeObserver(redraw).observe(by("pool").parentElement);
  by("replica").addEventListener("change", () => {
    chosen = by("replica").selectedIndex;
    redraw();
  });
  by("pause").addEventListener("click", () => {
    paused = !paused;
    by("pause").setAttribute("aria-pressed", String(paused));
    by("pause").textContent = paused ? "Go on" : "Pause";
  });
  follow();
}
