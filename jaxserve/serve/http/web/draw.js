// Canvas drawings of the live view. Colours come from the style sheet, so both themes are one set of names.

let colours = {};
let unit = 1; // CSS pixels of what is 1 at a font size of 15: on large screens the page's text is larger

export function readStyle() {
  const style = getComputedStyle(document.documentElement);
  const names = ["free", "cached", "used", "shared", "withheld", "decode", "prefill", "dots", "line", "muted", "ink"];
  unit = parseFloat(style.fontSize) / 15;
  colours = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// A context in CSS pixels, cleared.
function open(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = `${11 * unit}px system-ui, sans-serif`;
  return { context, width, height };
}

const STATES = { f: "free", c: "cached", u: "used", s: "shared", w: "withheld" };
const RANK = { w: 0, f: 1, c: 2, u: 3, s: 4 };

// "4f1u" -> "ffffu"
export function expand(runs) {
  let text = "";
  for (const [, count, letter] of runs.matchAll(/(\d+)([fcusw])/g)) text += letter.repeat(Number(count));
  return text;
}

// How many cells fit, how large each is, and how many pages one of them stands for.
export function layout(width, height, pages) {
  let side = Math.round(28 * unit);
  const fits = (n) => Math.floor(width / n) * Math.floor(height / n);
  while (side > 3 && fits(side) < pages) side -= 1;
  const each = Math.max(1, Math.ceil(pages / fits(side)));
  return { side, columns: Math.floor(width / side), each };
}

// One cell a page, in the order of page ids; a cell of several pages has the busiest state among them.
export function drawPool(canvas, states) {
  const { context, width, height } = open(canvas);
  const { side, columns, each } = layout(width, height, states.length);
  const cells = { w: [], f: [], c: [], u: [], s: [] };
  for (let cell = 0; cell * each < states.length; cell += 1) {
    let state = states[cell * each];
    for (let page = cell * each + 1; page < Math.min(states.length, (cell + 1) * each); page += 1) {
      if (RANK[states[page]] > RANK[state]) state = states[page];
    }
    cells[state].push(cell);
  }
  const gap = side > 4 ? 1 : side > 3 ? 0.5 : 0;
  for (const [letter, list] of Object.entries(cells)) { // one colour at a time: changing it is what costs
    context.fillStyle = colours[STATES[letter]];
    context.beginPath();
    for (const cell of list) {
      context.rect((cell % columns) * side, Math.floor(cell / columns) * side, side - gap, side - gap);
    }
    context.fill();
  }
  return each;
}

// A round number not below `value`.
export function ceiling(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= value * 0.9999);
}

const TOP = 8;
const left = () => 60 * unit; // room for the numbers of an axis

// Lines at 0, half and `top`; `bottom` is left free below. Returns the height of a value.
function axis({ context, width, height }, top, format, bottom = 4 * unit) {
  const y = (value) => TOP + (height - TOP - bottom) * (1 - value / top);
  context.strokeStyle = colours.line;
  context.fillStyle = colours.muted;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const value of [0, top / 2, top]) {
    const at = Math.round(y(value)) + 0.5;
    context.beginPath();
    context.moveTo(left(), at);
    context.lineTo(width, at);
    context.stroke();
    context.fillText(format(value), left() - 6 * unit, Math.min(at, height - 6 * unit));
  }
  return y;
}

const bar = () => Math.round(4 * unit); // pixels of a step, gap included

// Stacked bars, the newest step at the right. `steps`: rows by {decode, prefill}.
export function drawSteps(canvas, steps) {
  const frame = open(canvas);
  const { context, width } = frame;
  const shown = steps.slice(-Math.floor((width - left()) / bar()));
  const most = Math.max(1, ...shown.map((s) => s.decode + s.prefill));
  const top = 2 * (most <= 20 ? Math.ceil(most / 2) : ceiling(most / 2)); // half of it is a number of rows, too
  const y = axis(frame, top, short);
  for (const name of ["decode", "prefill"]) {
    context.fillStyle = colours[name];
    context.beginPath();
    shown.forEach((step, i) => {
      const base = name === "prefill" ? step.decode : 0;
      if (step[name] <= 0) return;
      const x = width - (shown.length - i) * bar();
      context.rect(x, y(base + step[name]), bar() - 1, y(base) - y(base + step[name]));
    });
    context.fill();
  }
}

export const short = (value) => (value >= 1000 ? `${+(value / 1000).toFixed(1)}k` : `${+value.toFixed(1)}`);

export function duration(ms) {
  if (ms >= 1000) return `${+(ms / 1000).toFixed(2)} s`;
  if (ms < 1) return `${+ms.toPrecision(3)} ms`; // half of an axis that ends at 0.25 is 0.125
  return `${+ms.toFixed(ms >= 100 ? 0 : ms >= 10 ? 1 : 2)} ms`; // of one that ends at 25 it is 12.5
}

// The end of the axis: rare values far above the others must not flatten them, and are drawn at the end.
function reach(points) {
  const values = points.map((p) => p[1]).sort((a, b) => a - b);
  if (values.length < 50) return { top: ceiling(values.at(-1) ?? 0), cut: false }; // of so few, none is rare
  const most = values[Math.floor(0.98 * (values.length - 1))], largest = values.at(-1);
  return largest > 2 * most ? { top: ceiling(1.3 * most), cut: true } : { top: ceiling(largest), cut: false };
}

// Values over the last `span` ms: a dot each, or for many the range of each pixel column. `points`: [t, ms].
export function drawTimes(canvas, points, now, span) {
  const frame = open(canvas);
  const { context, width } = frame;
  const { top, cut } = reach(points);
  const scale = axis(frame, top, (ms) => (cut && ms === top ? `≥ ${duration(ms)}` : duration(ms)), 18 * unit);
  const y = (value) => scale(Math.min(value, top));
  context.textBaseline = "bottom";
  context.textAlign = "left";
  context.fillText(`${span / 1000} s ago`, left(), frame.height);
  context.textAlign = "right";
  context.fillText("now", width, frame.height);
  const x = (t) => left() + (width - left() - 3) * (1 - (now - t) / span);
  context.fillStyle = colours.dots;
  context.beginPath();
  if (points.length <= 400) {
    for (const [t, value] of points) {
      context.moveTo(x(t) + 2 * unit, y(value));
      context.arc(x(t), y(value), 2 * unit, 0, 7);
    }
  } else {
    const columns = new Map();
    for (const [t, value] of points) {
      const at = Math.round(x(t));
      const [low, high] = columns.get(at) ?? [value, value];
      columns.set(at, [Math.min(low, value), Math.max(high, value)]);
    }
    for (const [at, [low, high]] of columns) context.rect(at - 0.5, y(high) - 1, 1.5, y(low) - y(high) + 2);
  }
  context.fill();
}
