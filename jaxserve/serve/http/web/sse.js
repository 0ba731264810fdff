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
  constructor(status, message, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

function headers(body) {
  const all = key ? { authorization: `Bearer ${key}` } : {};
  return body === undefined ? all : { ...all, "content-type": "application/json" };
}

async function explain(response) {
  if (response.status === 401) document.dispatchEvent(new Event("keywanted"));
  try {
    const { message, code } = (await response.json()).error;
    return new Refused(response.status, message, code);
  } catch { // not our error object: a proxy's page, say
    return new Refused(response.status, `${response.status} ${response.statusText}`);
  }
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
