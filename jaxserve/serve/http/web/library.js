// Which chats there are, and which one is shown: the list, its buttons, and the place where chats are kept.

import { ChatList } from "./chatlist.js";
import { ChatStore, MOST_CHATS, StoreFull, newId } from "./chatstore.js";
import { Conversation } from "./conversation.js";
import { ask } from "./dialog.js";
import { download } from "./download.js";

const TITLE_LENGTH = 60;

const by = (id) => document.getElementById(id);

function titleOf({ text, files }) {
  const line = text.trim().split("\n")[0] || files[0]?.name || "A picture";
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
}

// A chat in memory: {id, title, changed, settings, conversation, isGone}. `title` is "" until something was asked.
export class Library {
  // `onShow(chat)` is called when another chat is to be shown; `running`: Map of the chats that are being answered by id.
  constructor(running, onShow) {
    this.running = running;
    this.onShow = onShow;
    this.store = null;
    this.chat = this.blank();
    this.list = new ChatList(by("chat-list"), by("chat-filter"), {
      open: (id) => this.open(id),
      rename: (id, title) => this.rename(id, title),
      download: () => download(this.chat),
      remove: (id, title) => this.remove(id, title),
    });
    by("new-chat").addEventListener("click", () => this.begin());
    by("delete-all").addEventListener("click", () => this.removeAll());
  }

  // Shows the chat that the page's address names: after a reload that is the same one again.
  async start() {
    try {
      this.store = await ChatStore.open((id) => this.changedElsewhere(id));
    } catch (error) {
      this.complain(`This browser keeps no chats: ${error.message}`);
      return;
    }
    const chat = await this.read(location.hash.slice(1));
    if (chat && !this.chat.title) this.show(chat);
    window.addEventListener("popstate", () => this.follow());
    await this.refresh();
  }

  // The browser's way back and forth leads from chat to chat. One that is no longer there is an empty one.
  async follow() {
    const id = location.hash.slice(1);
    if (id !== this.chat.id) this.show((await this.find(id)) ?? this.blank());
    await this.refresh();
  }

  async find(id) {
    return this.running.get(id)?.chat ?? (await this.read(id));
  }

  blank() {
    return { id: newId(), title: "", changed: 0, settings: null, conversation: new Conversation(), isGone: false };
  }

  async read(id) {
    const kept = await this.store.get(id);
    if (!kept) return null;
    const { title, changed, settings } = kept;
    return { id, title, changed, settings, conversation: new Conversation(kept), isGone: false };
  }

  show(chat) {
    this.chat = chat;
    history.replaceState(null, "", chat.title ? `#${chat.id}` : location.pathname);
    this.onShow(chat);
  }

  // As `show`, but the browser's Back leads to the chat that was shown before, if something was asked in it.
  goTo(chat) {
    if (this.chat.title && !this.chat.isGone && chat.id !== this.chat.id) history.pushState(null, "", location.href);
    this.show(chat);
  }

  begin() {
    this.goTo(this.blank());
    this.refresh();
    by("prompt").focus();
  }

  async open(id) {
    const chat = await this.find(id);
    if (chat) this.goTo(chat);
    await this.refresh();
  }

  // Keeps a chat after a change, as far as there is room.
  async save(chat, settings) {
    if (!chat.title) chat.title = titleOf(chat.conversation.messages[0]);
    if (chat === this.chat) history.replaceState(null, "", `#${chat.id}`);
    chat.settings = settings;
    chat.changed = Date.now();
    await this.write(chat);
  }

  // Of a chat whose only question was taken back.
  async forget(chat) {
    chat.title = "";
    if (chat === this.chat) history.replaceState(null, "", location.pathname);
    await this.store?.remove(chat.id);
    await this.refresh();
  }

  async write(chat) {
    if (!this.store || chat.isGone) return;
    const { id, title, changed, settings, conversation } = chat;
    try {
      await this.store.save({ id, title, changed, settings, ...conversation.record });
      this.complain(null);
    } catch (error) {
      const remedy = error instanceof StoreFull ? "delete some chats, and it is kept from its next message on" : "reload the page";
      this.complain(`“${title}” is not kept: ${error.message}; ${remedy}.`);
    }
    await this.refresh();
  }

  async rename(id, title) {
    const name = await ask({ question: "New title of the chat", action: "Rename", value: title });
    if (!name) return;
    const chat = this.chat.id === id ? this.chat : await this.read(id);
    if (!chat) return;
    chat.title = name;
    await this.write(chat);
  }

  async remove(id, title) {
    if (!(await ask({ question: `Delete “${title}” from this browser?`, action: "Delete" }))) return;
    this.leave(id);
    await this.store.remove(id);
    this.complain(null);
    this.begin();
  }

  async removeAll() {
    const heads = await this.store.list();
    if (!(await ask({ question: `Delete all ${heads.length} chats from this browser?`, action: "Delete all" }))) return;
    for (const { id } of heads) this.leave(id);
    await this.store.removeAll();
    this.complain(null);
    this.begin();
  }

  // Ends the answer of a chat that is deleted; it must not be kept again.
  leave(id) {
    const running = this.running.get(id);
    if (this.chat.id === id) this.chat.isGone = true;
    if (!running) return;
    running.chat.isGone = true;
    running.controller.abort();
  }

  // Another tab has written or deleted a chat, or all of them.
  async changedElsewhere(id) {
    const { chat } = this;
    if (chat.title && !this.running.has(chat.id) && (id === null || id === chat.id)) {
      const kept = await this.read(chat.id);
      if (kept) this.show(kept);
      else this.show(this.blank());
    }
    await this.refresh();
  }

  async refresh() {
    by("chat-title").textContent = this.chat.title || "New chat";
    if (!this.store) return;
    const heads = await this.store.list();
    this.list.show(heads, this.chat.id, this.running);
    by("delete-all").hidden = !heads.length;
    by("num-chats").textContent = heads.length > 0.9 * MOST_CHATS ? `${heads.length} of at most ${MOST_CHATS}` : "";
  }

  complain(text) {
    by("chats-error").textContent = text ?? "";
    by("chats-error").hidden = !text;
  }
}
