// Markdown of a model as nodes of the page. marked cuts the text into tokens; each becomes an element that is made here, with
// text set as text. No string is ever read as HTML, so tags of an answer are shown as they stand, and nothing is loaded:
// pictures become links. Formulas are cut out before Markdown reads their stars and backslashes, and temml draws them.

import { copyButton } from "./copy.js";
import { Marked } from "./marked.esm.js";
import temml from "./temml.esm.js";

const DEEPEST = 30; // of lists in quotes in lists; what is deeper is shown as it was written
const LONGEST = 200_000; // characters; a longer answer is shown as it was written
const SCHEMES = ["http:", "https:", "mailto:"];

const DRAWN = { throwOnError: true, trust: false, maxSize: [10, 50], maxExpand: 500 }; // sizes in em

// A formula within a line of text, of at most 10,000 characters. A dollar is a price where a blank is inside of it, or a
// digit after the second one, and no formula holds what begins code.
const INLINE = /^(?:\$\$(?!\$)((?:\\[^]|[^\\$`]){1,10000}?)\$\$|\$(?![\s$])((?:\\[^]|[^\\$\n`])*?(?:[^\s\\$`]|\\\S))\$(?!\d)|\\\(([^]{1,10000}?)\\\)|\\\[([^]{1,10000}?)\\\])/;
// One that stands alone.
const BLOCK = /^ {0,3}(?:\$\$((?:\\[^]|[^\\$]){1,10000}?)\$\$|\\\[([^]{1,10000}?)\\\])[ \t]*(?:\n+|$)/;

function formula(level, pattern) {
  return {
    name: `${level}Formula`,
    level,
    start: (source) => {
      const found = source.search(level === "block" ? /(?<=^|\n) {0,3}(?:\$\$|\\\[)/ : /\$|\\[([]/);
      return found < 0 ? undefined : found;
    },
    tokenizer(source) {
      const found = pattern.exec(source);
      if (!found) return undefined;
      const body = found.slice(1).find((part) => part !== undefined);
      const apart = level === "block";
      if (!body.trim() || /\n[ \t]*\n/.test(body)) return undefined;
      return { type: `${level}Formula`, raw: found[0], body, apart };
    },
  };
}

const reader = new Marked({ gfm: true, breaks: true, extensions: [formula("inline", INLINE), formula("block", BLOCK)] });

const names = new Map(); // character references that were met, by their name

// Markdown leaves "&eacute;" to the browser. Only such a name is ever parsed, never anything around it.
function named(reference) {
  if (!names.has(reference)) {
    names.set(reference, new DOMParser().parseFromString(reference, "text/html").documentElement.textContent);
  }
  return names.get(reference);
}

const decode = (text) => text.replace(/&(?:#\d{1,7}|#x[\da-f]{1,6}|[a-z][a-z\d]{1,31});/gi, named);

function element(name, children = [], className = "") {
  const made = document.createElement(name);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

function link(href, children) {
  const target = decode(href);
  if (!URL.canParse(target) || !SCHEMES.includes(new URL(target).protocol)) return element("span", children);
  const made = element("a", children);
  made.href = target;
  made.title = target; // the text may say something else
  made.target = "_blank";
  made.rel = "noopener noreferrer nofollow";
  return made;
}

// What is wider than the column scrolls within itself, by keyboard as well.
function scroller(name, child, label) {
  const made = element(name, [child]);
  made.tabIndex = 0;
  made.setAttribute("role", "group");
  made.setAttribute("aria-label", label);
  return made;
}

function code({ text, lang }) {
  const language = decode((lang ?? "").trim().split(/\s/)[0]);
  const head = element("div", [element("span", [language]), copyButton(() => text, "this code")], "code-head");
  return element("div", [head, scroller("pre", element("code", [text]), language ? `Code, ${language}` : "Code")], "code");
}

function list({ ordered, start, items }, depth) {
  const made = element(ordered ? "ol" : "ul", items.map((item) => {
    const entry = element("li", nodes(item.tokens, depth));
    if (item.task) entry.className = "task"; // its box stands in the place of the bullet
    return entry;
  }));
  if (ordered && Number.isInteger(start) && start !== 1) made.start = start;
  return made;
}

function table({ header, align, rows }, depth) {
  const row = (cells, name) => element("tr", cells.map((cell, column) => {
    const made = element(name, nodes(cell.tokens, depth));
    if (align[column]) made.classList.add(`to-${align[column]}`);
    return made;
  }));
  const body = rows.map((cells) => row(cells, "td"));
  const whole = element("table", [element("thead", [row(header, "th")]), element("tbody", body)]);
  const made = scroller("div", whole, "Table");
  made.className = "table";
  return made;
}

// A heading has a level only where the page knows which one comes before it.
function heading({ depth: size, level, tokens }, depth) {
  return element(level ? `h${level}` : "p", nodes(tokens, depth), `heading size-${size}`);
}

// What temml cannot read is shown as it was written.
function drawn({ body, raw, apart }) {
  const math = element("span", [], "formula");
  try {
    temml.render(body, math, { ...DRAWN, displayMode: apart });
  } catch {
    math.replaceChildren(raw.trim());
  }
  if (!apart) return math;
  const made = scroller("div", math, "Formula");
  made.className = "formula-apart";
  return made;
}

const text = (token, depth) => (token.tokens ? nodes(token.tokens, depth) : [decode(token.text)]);
const wrapped = (name) => (token, depth) => [element(name, nodes(token.tokens, depth))];

const KINDS = {
  space: () => [],
  def: () => [],
  checkbox: ({ checked }) => [checked ? "☑ " : "☐ "],
  br: () => [element("br")],
  hr: () => [element("hr")],
  text,
  escape: ({ text }) => [text],
  codespan: ({ text }) => [element("code", [text])],
  code: (token) => [code(token)],
  paragraph: wrapped("p"),
  blockquote: wrapped("blockquote"),
  strong: wrapped("strong"),
  em: wrapped("em"),
  del: wrapped("del"),
  heading: (token, depth) => [heading(token, depth)],
  list: (token, depth) => [list(token, depth)],
  table: (token, depth) => [table(token, depth)],
  link: (token, depth) => [link(token.href, nodes(token.tokens, depth))],
  inlineFormula: (token) => [drawn(token)],
  blockFormula: (token) => [drawn(token)],
  image: (token) => [link(token.href, [`[picture: ${decode(token.text) || token.href}]`])],
};

// What has no kind here is shown as it was written: HTML above all.
function nodes(tokens, depth) {
  return tokens.flatMap((token) => {
    if (depth >= DEEPEST || !Object.hasOwn(KINDS, token.type)) return [token.raw];
    return KINDS[token.type](token, depth + 1);
  });
}

// Levels go on from the page's own h2 and never skip one, whatever the model begins with.
function giveLevels(tokens) {
  let last = 2;
  for (const token of tokens) {
    if (token.type === "heading") token.level = last = Math.min(token.depth + 2, last + 1, 6);
  }
}

function cut(text) {
  if (text.length <= LONGEST) {
    try {
      const tokens = reader.lexer(text);
      giveLevels(tokens);
      return tokens;
    } catch (error) {
      console.warn("shown as it was written:", error); // nested too deeply for marked, say
    }
  }
  return [{ type: "plain", raw: text }];
}

// An element that shows an answer, whole or as it grows: only blocks that have changed are made again.
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.blocks = []; // of {raw, made}
  }

  show(text) {
    const tokens = cut(text);
    // A definition of a link changes text that is far from it.
    const changed = tokens.links && Object.keys(tokens.links).length ? 0
      : tokens.findIndex(({ raw }, index) => raw !== this.blocks[index]?.raw);
    const from = changed < 0 ? tokens.length : changed;
    for (const { made } of this.blocks.splice(from)) made.forEach((node) => node.remove());
    for (const token of tokens.slice(from)) {
      const wrapper = document.createDocumentFragment();
      const inline = !Object.hasOwn(KINDS, token.type) || token.type === "text";
      wrapper.append(...(inline ? [element("p", nodes([token], 0), "plain")] : nodes([token], 0)));
      const made = [...wrapper.childNodes];
      this.element.append(wrapper);
      this.blocks.push({ raw: token.raw, made });
    }
  }
}
