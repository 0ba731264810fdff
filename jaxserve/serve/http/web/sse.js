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
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(body) {
  const all = key ? { authorization: `Bearer ${key}` } : {};
  return body === undefined ? all : { ...all, "content-type": "application/json" };
}

async function explain(response) {
  let text = `${response.status} ${response.statusText}`;
  try {
    text = (await response.json()).error.message;
  } catch { /* not our error object: a proxy's page, say */ }
  return new Refused(response.status, text);
}

// The data of each event of the answer. Throws Refused for an answer that is not 2xx.
export async function* events(url, { body, signal } = {}) {
  const response = await fetch(url, {
    method: body === undefined ? "GET" : "POST",
    headers: headers(body),
    body: body === undefined ? undefined : JSON.stringify(body),
    signal,
    cache: "no-store",
  });
  if (!response.ok) throw await explain(response);
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
