// Server-sent events over fetch: EventSource can neither POST nor send a key.

let key = sessionStorage.getItem("jaxserve-key") ?? "";

export function setKey(text) {
  key = text.trim();
  sessionStorage.setItem("jaxserve-key", key); // this tab alone, until it is closed
}

export function getKey() {
  return key;
}

export class Refused extends Error {
  // `code`: the word of the API for what is wrong, where it has one.
  // `retryAfterS`: seconds after which the server wants to be asked again, 0 where it does not say.
  constructor(status, message, code = null, retryAfterS = 0) {
    super(message);
    this.status = status;
    this.code = code;
    this.retryAfterS = retryAfterS;
  }

  get isBusy() {
    return this.status === 429 || this.status === 503;
  }
}

function headers(body) {
  const all = key ? { authorization: `Bearer ${key}` } : {};
  return body === undefined ? all : { ...all, "content-type": "application/json" };
}

async function explain(response) {
  if (response.status === 401) document.dispatchEvent(new Event("keywanted"));
  const retryAfterS = Math.ceil(Number(response.headers.get("retry-after"))) || 0; // of a date, as proxies may send: 0
  try {
    const { message, code } = (await response.json()).error;
    return new Refused(response.status, message, code, retryAfterS);
  } catch { // not our error object: a proxy's page, say
    return new Refused(response.status, `${response.status} ${response.statusText}`, null, retryAfterS);
  }
}

// The answer, if it is 2xx. Throws Refused otherwise.
async function ask(url, body, signal) {
  const used = key;
  const response = await fetch(url, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(body),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw await explain(response);
  if (used) document.dispatchEvent(new CustomEvent("keyworks", { detail: used }));
  return response;
}

// The JSON that the server answers to a POST. Throws as `events`.
export async function post(url, body) {
  return (await ask(url, body)).json();
}

// The data of each event of the answer. Throws Refused for an answer that is not 2xx.
export async function* events(url, { body, signal } = {}) {
  const response = await ask(url, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).replaceAll("\r\n", "\n").split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
