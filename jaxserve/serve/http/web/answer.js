// One answer of the model, streamed into a message as it comes.

import { events } from "./sse.js";

const LEAST_TOKENS = 20; // of a rate: that of fewer is noise,
const LEAST_MS = 100; // and so is that of an answer which came all at once

const round = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

function describe({ started, first, ended, usage, reason, hasLimit }) {
  const facts = [];
  if (first !== null) facts.push(`first text after ${round(first - started)}`);
  const tokens = usage?.completion_tokens ?? 0;
  if (tokens) facts.push(`${tokens} tokens`);
  if (tokens >= LEAST_TOKENS && ended - first >= LEAST_MS) {
    facts.push(`${((tokens - 1) / ((ended - first) / 1000)).toFixed(1)} tokens/s`);
  }
  const cut = hasLimit ? "cut at max_tokens" : "cut: the context is full";
  if (reason) facts.push(reason === "length" ? cut : reason);
  return facts.join(" · ");
}

// Asks for `body` and fills `message`: `text` and `thoughts` grow, and `onGrowth` is told each time; at the end come
// `facts`, a line of text, and `tokens`, those of the whole conversation. What has come stays when this fails.
// Where it is ended by `signal`, it has its figures all the same.
export async function stream(body, message, { signal, onGrowth }) {
  const started = performance.now();
  let first = null, usage = null, reason = null, whole = false;
  const tell = () => {
    message.tokens = usage?.total_tokens ?? 0;
    message.facts = describe({ started, first, ended: performance.now(), usage, reason, hasLimit: body.max_tokens !== undefined });
  };
  signal.addEventListener("abort", () => {
    reason = "stopped";
    tell();
  }, { once: true });
  for await (const data of events("v1/chat/completions", { body, signal })) {
    whole = data === "[DONE]";
    if (whole) continue; // to the end of the stream: leaving it before would cost the connection
    const chunk = JSON.parse(data);
    if (chunk.error) throw new Error(chunk.error.message);
    usage = chunk.usage ?? usage;
    const choice = chunk.choices[0];
    if (!choice) continue;
    reason = choice.finish_reason ?? reason;
    const { content, reasoning_content: thought } = choice.delta;
    if (!content && !thought) continue;
    first ??= performance.now();
    if (thought) {
      message.thoughts += thought;
      message.thought_ms = performance.now() - first;
    }
    if (content) message.text += content;
    onGrowth();
  }
  if (!whole) throw new Error("the connection ended before the answer did");
  tell();
}
