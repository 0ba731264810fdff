// The chats of this browser, in IndexedDB: localStorage holds five megabytes, which a few pictures fill.
//
// A chat is {id, title, changed, settings, messages, end, start}; `changed` is ms since 1970. Beside each whole chat stands
// its head {id, title, changed, bytes}, so that a list of all is read without their texts and pictures.

export const MOST_CHATS = 200;
export const MOST_BYTES = 50e6; // of all chats, as JSON

export class StoreFull extends Error {}

const finished = (request) => new Promise((resolve, reject) => {
  request.addEventListener("success", () => resolve(request.result));
  request.addEventListener("error", () => reject(request.error));
});

const committed = (transaction) => new Promise((resolve, reject) => {
  transaction.addEventListener("complete", () => resolve());
  transaction.addEventListener("abort", () => reject(transaction.error));
});

export function newId() { // crypto.randomUUID is only there over https and on localhost
  return Array.from(crypto.getRandomValues(new Uint8Array(12)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export class ChatStore {
  // Fails where the browser keeps nothing, as some do in private windows. `onChange` is told of changes by other tabs.
  static async open(onChange) {
    const opening = indexedDB.open("jaxserve", 1);
    opening.addEventListener("upgradeneeded", () => {
      opening.result.createObjectStore("chats", { keyPath: "id" });
      opening.result.createObjectStore("heads", { keyPath: "id" });
    });
    return new ChatStore(await finished(opening), onChange);
  }

  constructor(database, onChange) {
    this.database = database;
    this.last = Promise.resolve(); // the last change
    this.tabs = new BroadcastChannel("jaxserve-chats");
    this.tabs.addEventListener("message", ({ data }) => onChange(data));
  }

  // Heads, latest change first.
  async list() {
    const heads = await finished(this.database.transaction("heads").objectStore("heads").getAll());
    return heads.sort((a, b) => b.changed - a.changed);
  }

  get(id) {
    return finished(this.database.transaction("chats").objectStore("chats").get(id));
  }

  // Throws StoreFull, and then what was kept of this chat before is still kept.
  save(chat) {
    return this.inTurn(() => this.put(chat));
  }

  remove(id) {
    return this.inTurn(() =>
      this.write(id, (chats, heads) => {
        chats.delete(id);
        heads.delete(id);
      }),
    );
  }

  removeAll() {
    return this.inTurn(() =>
      this.write(null, (chats, heads) => {
        chats.clear();
        heads.clear();
      }),
    );
  }

  // One change after the other: a save looks for room before it writes, and a removal that came between would be undone.
  inTurn(change) {
    const done = this.last.then(change);
    this.last = done.catch(() => {});
    return done;
  }

  async put(chat) {
    const others = (await this.list()).filter(({ id }) => id !== chat.id);
    const bytes = JSON.stringify(chat).length;
    if (others.length >= MOST_CHATS) throw new StoreFull(`${MOST_CHATS} chats are kept, which is the most`);
    if (others.reduce((sum, head) => sum + head.bytes, bytes) > MOST_BYTES) {
      throw new StoreFull(`the chats have ${MOST_BYTES / 1e6} MB, which is the most that is kept`);
    }
    const { id, title, changed } = chat;
    await this.write(id, (chats, heads) => {
      chats.put(chat);
      heads.put({ id, title, changed, bytes });
    });
  }

  async write(id, change) {
    const transaction = this.database.transaction(["chats", "heads"], "readwrite");
    change(transaction.objectStore("chats"), transaction.objectStore("heads"));
    try {
      await committed(transaction);
    } catch (error) {
      if (error?.name !== "QuotaExceededError") throw error;
      throw new StoreFull("the browser gives this page no more room");
    }
    this.tabs.postMessage(id);
  }
}
