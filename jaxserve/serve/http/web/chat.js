// The chat that is shown: what is asked, the answer as it comes, and what goes wrong. An answer goes on while another chat is
// shown.

import { stream } from "./answer.js";
import { Attachments } from "./attachments.js";
import { Library } from "./library.js";
import { MessageList, toSend } from "./messages.js";
import { Prompt } from "./prompt.js";
import { Settings } from "./settings.js";
import { getKey } from "./sse.js";
import { countDown, explain, pauseBefore } from "./trouble.js";

const SAVE_MS = 2000; // while an answer comes: as much may be lost when the page is closed

const by = (id) => document.getElementById(id);

export class Chat {
  // `getModel` tells of the model as that of `live.js`.
  constructor(getModel) {
    this.getModel = getModel;
    this.running = new Map(); // id of a chat -> {chat, controller}
    this.examples = null; // those on the page
    this.exampleList = by("examples"); // it is not in the page while messages are
    this.examplesPart = by("examples-part");
    this.remedy = null; // of the error that is shown: what its button does
    this.prompt = new Prompt(by("prompt"), by("chat-form"));
    this.list = new MessageList(by("messages"), by("empty"), by("to-end"), {
      retry: (id) => this.retry(id),
      edit: (id, text) => this.edit(id, text),
      show: (id) => this.showVersion(id),
    });
    this.attachments = new Attachments({
      form: by("chat-form"), field: by("prompt"), list: by("attachments"), chooser: by("chooser"), button: by("attach"),
      complain: (text) => this.complain(text),
      seesPictures: () => this.getModel().seesPictures,
    });
    this.settings = new Settings(() => {
      if (this.chat.title) this.library.save(this.chat, this.settings.values);
    });
    this.library = new Library(this.running, (chat) => this.show(chat));
    this.listen();
    this.library.start();
  }

  get chat() {
    return this.library.chat;
  }

  get isBusy() {
    return this.running.has(this.chat.id);
  }

  listen() {
    const form = by("chat-form");
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    // A field that is hidden cannot say what is wrong with it.
    form.addEventListener("invalid", (event) => event.target.closest("details")?.setAttribute("open", ""), true);
    by("stop").addEventListener("click", () => this.stop());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !by("dialog").open) this.stop();
    });
    by("leave-out").addEventListener("click", () => this.remedy?.());
  }

  // What a model says of itself is here.
  meetModel() {
    const { examples } = this.getModel();
    this.showContext();
    if (examples === this.examples) return;
    this.examples = examples;
    this.exampleList.replaceChildren(...examples.map((example) => {
      const item = document.createElement("li"), ask = document.createElement("button");
      ask.type = "button";
      ask.className = "quiet";
      ask.textContent = example;
      ask.addEventListener("click", () => {
        this.prompt.text = example;
        by("chat-form").requestSubmit();
      });
      item.append(ask);
      return item;
    }));
    this.examplesPart.hidden = !examples.length;
  }

  // Another chat, or this one with other messages.
  show(chat) {
    if (chat.settings) this.settings.set(chat.settings);
    this.complain(null);
    this.showMessages();
    this.list.toEnd();
    this.showBusy();
  }

  showMessages() {
    const { follows } = this.list;
    this.list.show(this.chat.conversation, this.isBusy);
    if (follows) this.list.toEnd();
    this.showContext();
  }

  // How much of what the model can take in this conversation is. Nothing where it is not known.
  showContext() {
    const used = this.chat.conversation.path.findLast(({ tokens }) => tokens)?.tokens ?? 0, most = this.getModel().maxLen;
    by("context").hidden = !used || !most;
    if (!used || !most) return;
    by("context-meter").max = most;
    by("context-meter").high = 0.75 * most;
    by("context-meter").value = used;
    by("context-text").textContent = `${used} of ${most} tokens`;
  }

  // Whoever pressed a button that goes now stands in the field then, not at the top of the page, and not on a button that
  // the next blank would press.
  showBusy() {
    const [send, stop] = [by("send"), by("stop")], had = document.activeElement;
    const follows = had === document.body || had === (this.isBusy ? send : stop);
    send.disabled = this.isBusy;
    stop.hidden = !this.isBusy;
    if (follows && !this.prompt.focus()) (this.isBusy ? stop : send).focus();
  }

  // `remedy`, where there is one, leaves out the oldest messages and asks again.
  complain(text, remedy = null) {
    by("chat-error-text").textContent = text ?? "";
    by("chat-error").hidden = !text;
    by("leave-out").hidden = !remedy;
    this.remedy = remedy;
  }

  send() {
    const { chat } = this, { conversation } = chat;
    const { text } = this.prompt;
    if ((!text && this.attachments.isEmpty) || this.isBusy) return;
    const attached = this.attachments.take(), isFirst = conversation.numQuestions === 0;
    conversation.add({ role: "user", text, ...attached });
    this.prompt.text = "";
    const undo = () => {
      conversation.dropLast();
      this.prompt.text = text;
      this.attachments.set(attached);
    };
    const shorter = () => {
      conversation.leaveOutOldest(true);
      by("chat-form").requestSubmit();
    };
    this.answer({ undo, shorter: isFirst ? null : shorter });
  }

  // Another answer beside one that there is.
  retry(id) {
    const { conversation } = this.chat, { end } = conversation;
    if (this.isBusy) return;
    conversation.cutBefore(id);
    const undo = () => (conversation.end = end);
    const shorter = () => {
      conversation.cutBefore(id);
      conversation.leaveOutOldest();
      ask();
    };
    const ask = () => this.answer({ undo, shorter: conversation.numQuestions > 1 ? shorter : null });
    ask();
  }

  // Another question beside one that there is. Without an answer it stays all the same, and its answer can be retried.
  edit(id, text) {
    const { conversation } = this.chat, { pictures, files } = conversation.messages[id];
    if (this.isBusy) return;
    conversation.cutBefore(id);
    conversation.add({ role: "user", text, pictures, files });
    const shorter = () => {
      conversation.leaveOutOldest();
      this.retry(conversation.end);
    };
    this.answer({ shorter: conversation.numQuestions > 1 ? shorter : null });
  }

  showVersion(id) {
    if (this.isBusy) return;
    this.chat.conversation.show(id);
    this.showMessages();
    this.library.save(this.chat, this.settings.values);
    this.list.focus(id);
  }

  stop() {
    this.running.get(this.chat.id)?.controller.abort();
  }

  request(conversation) {
    const { system, sampling } = this.settings;
    return {
      model: this.getModel().name || undefined, // not known yet: the server has only one
      messages: [...(system ? [{ role: "system", content: system }] : []), ...toSend(conversation.sent)],
      stream: true,
      stream_options: { include_usage: true, continuous_usage_stats: true }, // an answer that is stopped has figures, too
      ...sampling,
    };
  }

  // Asks for an answer to the end of the conversation. `undo` takes the question back if nothing was said at all, so that
  // it may be changed and asked again; `shorter` asks again for less, where the conversation exceeds the context.
  async answer({ undo, shorter }) {
    const { chat } = this, { conversation } = chat, settings = this.settings.values;
    const body = this.request(conversation);
    const message = conversation.add({ role: "assistant", text: "", thoughts: "", facts: "" });
    const controller = new AbortController();
    this.running.set(chat.id, { chat, controller });
    this.complain(null);
    this.showMessages();
    this.list.toEnd();
    this.showBusy();
    this.library.save(chat, settings);
    let saved = performance.now(), failure = null;
    const onGrowth = () => {
      if (chat === this.chat) this.list.growLast();
      if (performance.now() - saved < SAVE_MS) return;
      saved = performance.now();
      this.library.save(chat, settings);
    };
    try {
      await this.ask(chat, body, message, { signal: controller.signal, onGrowth });
    } catch (error) {
      failure = error;
    }
    this.running.delete(chat.id);
    const isShown = chat === this.chat, isStopped = failure?.name === "AbortError";
    if (failure && undo && isShown && !message.text && !message.thoughts) {
      conversation.dropLast();
      undo();
    }
    if (isShown) {
      this.showMessages();
      this.showBusy();
      this.complain(null); // it may have been waiting
    }
    if (conversation.messages.length) await this.library.save(chat, settings);
    else await this.library.forget(chat);
    if (!failure || isStopped || !isShown) return;
    const { maxLen } = this.getModel();
    const { text, isHelped } = await explain(failure, { body, most: maxLen, isFirst: !shorter, hasKey: Boolean(getKey()) });
    if (chat === this.chat && !this.isBusy) this.complain(text, isHelped ? shorter : null);
  }

  // Streams, and asks a busy server again after the pause that it asks for.
  async ask(chat, body, message, options) {
    for (let tries = 1; ; tries += 1) {
      try {
        return await stream(body, message, options);
      } catch (error) {
        const seconds = pauseBefore(error, tries);
        if (!seconds) throw error;
        await countDown(seconds, options.signal, (left) => {
          if (chat === this.chat) this.complain(`The server is busy. The question is asked again in ${left} s.`);
        });
        if (chat === this.chat) this.complain(null);
      }
    }
  }
}
