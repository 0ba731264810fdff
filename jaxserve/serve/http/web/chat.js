// The playground: one conversation, streamed. Text of the model is only ever set as text, never as HTML.

import { events } from "./sse.js";

const by = (id) => document.getElementById(id);
const history = []; // of {role, content}
let abort = null;

function add(role, text) {
  by("empty")?.remove();
  const item = document.createElement("li");
  item.className = role;
  const span = document.createElement("span");
  span.className = "text";
  span.textContent = text;
  item.append(span);
  by("messages").append(item);
  item.scrollIntoView({ block: "end" });
  return item;
}

function body(model) {
  const number = (id) => (by(id).value === "" ? undefined : Number(by(id).value));
  const system = by("system").value.trim();
  return {
    model: model || undefined, // not known yet: the server has only one
    messages: system ? [{ role: "system", content: system }, ...history] : history,
    stream: true,
    stream_options: { include_usage: true },
    temperature: number("temperature"),
    top_p: number("top_p"),
    max_tokens: number("max_tokens"),
    seed: number("seed"),
  };
}

// Asks for an answer to `history` and writes it into `item` as it comes.
async function answer(model, maxLen, item) {
  const text = item.querySelector(".text");
  const started = performance.now();
  let first = null, usage = null, reason = null, content = "", whole = false;
  const list = by("messages");
  for await (const data of events("v1/chat/completions", { body: body(model), signal: abort.signal })) {
    whole = data === "[DONE]";
    if (whole) continue; // to the end of the stream: leaving it before would cost the connection
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    if (!choice.delta.content) continue;
    first ??= performance.now();
    content += choice.delta.content;
    const follow = list.scrollHeight - list.scrollTop - list.clientHeight < 40;
    text.textContent = content;
    if (follow) list.scrollTop = list.scrollHeight;
  }
  if (!whole) throw new Error("the connection ended before the answer did");
  history.push({ role: "assistant", content });
  showContext(usage?.total_tokens ?? 0, maxLen);
  addFacts(item, { started, first, ended: performance.now(), usage, reason });
}

// How much of what the model can take in this conversation is. Nothing where it is not known.
function showContext(used, most) {
  by("context").hidden = !used || !most;
  if (!used || !most) return;
  by("context-meter").max = most;
  by("context-meter").high = 0.75 * most;
  by("context-meter").value = used;
  by("context-text").textContent = `${used} of ${most} tokens`;
}

function addFacts(item, { started, first, ended, usage, reason }) {
  const facts = [];
  if (first !== null) facts.push(`first text after ${Math.round(first - started)} ms`);
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens) facts.push(`${tokens} tokens`);
  if (tokens >= 20 && ended > first) facts.push(`${((tokens - 1) / ((ended - first) / 1000)).toFixed(1)} tokens/s`);
  const cut = by("max_tokens").value === "" ? "cut: the context is full" : "cut at max_tokens";
  if (reason) facts.push(reason === "length" ? cut : reason);
  const line = document.createElement("span");
  line.className = "facts";
  line.textContent = facts.join(" · ");
  item.append(line);
  item.scrollIntoView({ block: "end" });
}

// Whoever pressed one button by keyboard stands on the other one then, not at the top of the page.
function setBusy(busy) {
  const [send, stop] = [by("send"), by("stop")];
  const follow = document.activeElement === (busy ? send : stop);
  send.disabled = busy;
  stop.hidden = !busy;
  if (follow) (busy ? stop : send).focus();
}

export function startChat(getModel, getMaxLen) {
  by("chat-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const prompt = by("prompt").value.trim();
    if (!prompt || abort) return;
    by("chat-error").hidden = true;
    history.push({ role: "user", content: prompt });
    const asked = add("user", prompt);
    by("prompt").value = "";
    const item = add("assistant", "");
    item.classList.add("writing");
    item.setAttribute("aria-busy", "true"); // so that a screen reader speaks once, not at every token
    const mine = (abort = new AbortController());
    setBusy(true);
    try {
      await answer(getModel(), getMaxLen(), item);
    } catch (error) {
      if (mine !== abort) return; // another chat has begun meanwhile
      const text = item.querySelector(".text").textContent;
      if (text) { // half an answer is worth keeping, whatever ended it
        history.push({ role: "assistant", content: text });
      } else { // nothing was said: the question may be changed and asked again
        history.pop();
        item.remove();
        asked.remove();
        by("prompt").value = prompt;
      }
      if (error.name !== "AbortError") {
        by("chat-error").textContent = error instanceof TypeError ? "the server does not answer" : error.message;
        by("chat-error").hidden = false;
      }
    } finally {
      item.classList.remove("writing");
      item.removeAttribute("aria-busy");
      if (mine === abort) {
        abort = null;
        setBusy(false);
      }
    }
  });
  // A field that is hidden cannot say what is wrong with it.
  by("chat-form").addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
  by("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      by("chat-form").requestSubmit();
    }
  });
  by("stop").addEventListener("click", () => abort?.abort());
  by("clear").addEventListener("click", () => {
    const running = abort;
    abort = null;
    running?.abort();
    setBusy(false);
    history.length = 0;
    by("messages").replaceChildren();
    showContext(0, 0);
    by("chat-error").hidden = true;
    by("prompt").focus();
  });
}
