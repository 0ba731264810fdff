// What went wrong with a question, in the words of the page: its readers know nothing of the API behind it.

import { Refused, post } from "./sse.js";

const TOO_LONG = "context_length_exceeded";
const FIELD = /\w_\w|\w\[\d+\]|\bnull\b|the header|\{|\}/; // a part of a sentence that speaks of fields of the API

// The server's sentence, without what only a program can do anything with.
export function plain(message) {
  const said = message.replace(/^[a-z_]+(?:\[\d+\]|\.[a-z_]+)+:? /i, "");
  const parts = said.split("; ").filter((part) => !FIELD.test(part));
  return parts.join("; ") || "The server does not take this request.";
}

// Tokens of messages as the model would be sent them; null where that cannot be told.
async function count(model, messages) {
  try {
    return (await post("tokenize", { model, messages })).count;
  } catch {
    return null; // so long that the server does not even count it, or it has gone meanwhile
  }
}

async function counts({ model, messages }) {
  const question = messages.filter(({ role }, index) => role === "system" || index === messages.length - 1);
  return { question: await count(model, question), conversation: await count(model, messages) };
}

const words = (tokens) => (tokens === null ? "too many tokens to count" : `${tokens} tokens`);

function tooLong({ question, conversation }, most, isFirst) {
  const limit = most ? `the model takes in ${most}, its answer included` : "the model takes in less";
  if (question !== null && question < (most || Infinity)) {
    return isFirst ? `The question has ${words(question)}, and ${limit}.`
      : `The question has ${words(question)} and the whole conversation ${words(conversation)}; ${limit}.`;
  }
  const rest = isFirst ? "" : ` The whole conversation has ${words(conversation)}.`;
  return `The question alone has ${words(question)}, and ${limit}: please shorten it.${rest}`;
}

// {text, isHelped}: what to say of an error, and whether leaving out older messages helps. `body` is what was asked, `most`
// the tokens of a sequence, 0 if they are not known, `isFirst`: there is nothing older than the question.
export async function explain(error, { body, most, isFirst, hasKey }) {
  const said = (text) => ({ text, isHelped: false });
  if (error instanceof TypeError) return said("The server does not answer. Please try again when it is back.");
  if (!(error instanceof Refused)) return said(plain(error.message));
  if (error.status === 401) {
    return said(hasKey ? "The server does not accept this API key. Please correct it at the top of the page."
      : "The server wants an API key. Please give one at the top of the page.");
  }
  if (error.code === TOO_LONG) {
    const found = await counts(body);
    const isHelped = !isFirst && found.question !== null && found.question < (most || Infinity);
    return { text: tooLong(found, most, isFirst), isHelped };
  }
  if (error.isBusy) {
    const when = error.retryAfterS ? ` It asks for a pause of ${pause(error.retryAfterS)}.` : " Please try again later.";
    return said(`The server is busy.${when}`);
  }
  if (error.status === 413) return said("The message is larger than the server takes. Please attach less.");
  if (error.status === 400 && body.max_tokens && most) {
    const { conversation } = await counts(body);
    if (conversation !== null && conversation + body.max_tokens > most) {
      return said(`The conversation has ${words(conversation)} and max_tokens is ${body.max_tokens}, but the model has room for `
        + `${most} in all. Please lower max_tokens in the settings, or leave it empty.`);
    }
  }
  console.info(error.message);
  return said(plain(error.message));
}

const pause = (seconds) => (seconds < 120 ? `${seconds} s` : `${Math.round(seconds / 60)} minutes`);

const LONGEST_PAUSE_S = 120;
const MOST_TRIES = 5;

// Seconds after which a refused question is asked again by itself; 0: it is not. `tries`: how often it was asked.
export function pauseBefore(error, tries) {
  if (!(error instanceof Refused) || !error.isBusy || tries >= MOST_TRIES) return 0;
  return error.retryAfterS <= LONGEST_PAUSE_S ? error.retryAfterS : 0;
}

// Tells `say` the seconds that are left, one after the other. Throws what `signal` is aborted with.
export async function countDown(seconds, signal, say) {
  for (let left = seconds; left > 0; left -= 1) {
    say(left);
    await new Promise((resolve, reject) => {
      const timer = setTimeout(resolve, 1000);
      signal.addEventListener("abort", () => {
        clearTimeout(timer);
        reject(signal.reason);
      }, { once: true });
    });
  }
}
