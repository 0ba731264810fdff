// The messages of the chat, as a list of the page. What the model wrote is shown as Markdown, what the reader wrote as it is.

import { contentOf, fileElement, pictureElement } from "./attachments.js";
import { copyButton } from "./copy.js";
import { MarkdownView } from "./markdown.js";

const NEAR_PX = 60;

function button(text, what, onClick) {
  const made = document.createElement("button"), hidden = document.createElement("span");
  made.type = "button";
  made.className = "small";
  hidden.className = "hidden";
  hidden.textContent = ` ${what}`;
  made.append(text, hidden);
  made.addEventListener("click", onClick);
  return made;
}

function span(className, text) {
  const made = document.createElement("span");
  made.className = className;
  made.textContent = text;
  return made;
}

const seconds = (ms) => (ms < 10_000 ? (ms / 1000).toFixed(1) : Math.round(ms / 1000));

// One message. `number` is its place in the chat, from 1; `versions` are the ids of those beside it, itself among them.
class MessageView {
  constructor(message, number, actions) {
    this.message = message;
    this.isAnswer = message.role === "assistant";
    this.what = `${this.isAnswer ? "answer" : "message"} ${number}`;
    this.versions = [message.id];
    this.actions = actions;
    this.item = document.createElement("li");
    this.item.className = message.role;
    this.item.append(span("hidden", this.isAnswer ? "The model: " : "You: "));
    if (this.isAnswer) this.buildAnswer();
    else this.buildQuestion();
    this.foot = document.createElement("div");
    this.foot.className = "foot";
    this.item.append(this.foot);
  }

  buildQuestion() {
    const { pictures, files, text } = this.message;
    this.item.append(...pictures.map((url) => pictureElement(url, "a picture of this message")), ...files.map(fileElement));
    this.text = span("text", text);
    this.text.hidden = !text; // a picture may stand for itself
    this.item.append(this.text);
  }

  buildAnswer() {
    this.thoughts = document.createElement("details");
    this.thoughts.className = "thoughts";
    this.summary = document.createElement("summary");
    this.thought = document.createElement("div");
    this.thoughts.append(this.summary, this.thought);
    this.text = document.createElement("div");
    this.text.className = "text";
    this.view = new MarkdownView(this.text);
    this.item.append(this.thoughts, this.text);
  }

  // Shows what an answer has by now.
  grow() {
    const { text, thoughts, thought_ms: ms } = this.message;
    this.thoughts.hidden = !thoughts;
    if (thoughts) {
      const isDone = text || !this.isWriting;
      this.summary.textContent = !isDone ? "Thinking" : ms >= 100 ? `Thought for ${seconds(ms)} s` : "Thoughts";
      this.thought.textContent = thoughts.trim();
    }
    this.view.show(text);
  }

  get isWriting() {
    return this.item.classList.contains("writing");
  }

  // A screen reader speaks an answer once, when it is whole, and not at every token.
  set isWriting(writing) {
    this.item.classList.toggle("writing", writing);
    if (writing) this.item.setAttribute("aria-busy", "true");
    else this.item.removeAttribute("aria-busy");
  }

  // While an answer comes, nothing of the chat may be changed.
  showFoot(isBusy) {
    const { id, text, facts } = this.message;
    const place = this.versions.indexOf(id);
    const parts = [];
    const said = facts || (this.isAnswer && !this.isWriting ? "broken off" : ""); // it was closed while the answer came
    if (said) parts.push(span("facts", said));
    if (this.versions.length > 1) {
      const [older, newer] = [this.versions[place - 1], this.versions[place + 1]];
      const back = button("‹", `older version of ${this.what}`, () => this.actions.show(older));
      const on = button("›", `newer version of ${this.what}`, () => this.actions.show(newer));
      back.disabled = isBusy || older === undefined;
      on.disabled = isBusy || newer === undefined;
      parts.push(back, span("version", `${place + 1} of ${this.versions.length}`), on);
    }
    if (text && !this.isWriting) parts.push(copyButton(() => this.message.text, this.what));
    if (!isBusy && this.isAnswer) parts.push(button("Retry", this.what, () => this.actions.retry(id)));
    if (!isBusy && !this.isAnswer) parts.push(button("Edit", this.what, () => this.edit()));
    const focused = this.foot.contains(document.activeElement) ? document.activeElement.textContent : null;
    this.foot.replaceChildren(...parts);
    if (focused) parts.find(({ textContent }) => textContent === focused)?.focus();
  }

  // The text becomes a field. What is sent from it stands beside this message, which stays.
  edit() {
    const form = document.createElement("form"), field = document.createElement("textarea"), row = document.createElement("div");
    const send = document.createElement("button");
    const close = () => {
      form.remove();
      this.text.hidden = !this.message.text;
      this.foot.hidden = false;
      this.foot.lastChild.focus();
    };
    form.className = "edit";
    field.value = this.message.text;
    field.rows = Math.min(12, this.message.text.split("\n").length + 1);
    field.setAttribute("aria-label", `Text of ${this.what}`);
    send.textContent = "Send";
    row.className = "foot";
    row.append(button("Cancel", "the change", close), send);
    form.append(field, row);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      const { pictures, files } = this.message;
      if (field.value.trim() || pictures.length || files.length) this.actions.edit(this.message.id, field.value.trim());
    });
    form.addEventListener("keydown", (event) => {
      if (event.key === "Escape") {
        event.stopPropagation(); // it would stop an answer, too
        close();
      }
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.text.hidden = this.foot.hidden = true;
    this.item.append(form);
    field.focus();
  }
}

export class MessageList {
  // `actions`: retry(id), edit(id, text) and show(id). `toEndButton` is there while the end is out of sight.
  constructor(list, empty, toEndButton, actions) {
    this.list = list;
    this.empty = empty;
    this.actions = actions;
    this.views = [];
    this.isDue = false;
    this.cut = document.createElement("li");
    this.cut.className = "cut";
    this.cut.textContent = "The model is not sent what is above this line.";
    this.toEndButton = toEndButton;
    const look = () => (toEndButton.hidden = this.follows);
    list.addEventListener("scroll", look);
    new ResizeObserver(look).observe(list);
    toEndButton.addEventListener("click", () => {
      this.toEnd();
      list.focus({ preventScroll: true }); // the button goes
    });
  }

  // All of a conversation's path; `isBusy`: its last answer is just coming. What is shown already is left alone, so that a
  // screen reader speaks only of what is new, and what the reader has unfolded stays so.
  show(conversation, isBusy) {
    const path = conversation.path, known = new Map(this.views.map((view) => [view.message, view]));
    const sent = new Set(conversation.sent);
    this.views = path.map((message, index) => known.get(message) ?? new MessageView(message, index + 1, this.actions));
    for (const view of this.views) {
      view.versions = conversation.versions(view.message.id);
      view.isWriting = isBusy && view === this.views.at(-1);
      view.item.classList.toggle("unsent", !sent.has(view.message));
      if (view.isAnswer) view.grow();
      view.showFoot(isBusy);
    }
    const items = this.views.map(({ item }) => item), first = path.findIndex((message) => sent.has(message));
    if (first > 0) items.splice(first, 0, this.cut);
    this.place(items.length ? items : [this.empty]);
  }

  place(items) {
    for (const child of [...this.list.children]) {
      if (!items.includes(child)) child.remove();
    }
    items.forEach((item, index) => {
      const there = this.list.children[index] ?? null;
      if (there !== item) this.list.insertBefore(item, there);
    });
  }

  // Whether the reader is near the end, and so wants to see what comes.
  get follows() {
    const { scrollHeight, scrollTop, clientHeight } = this.list;
    return scrollHeight - scrollTop - clientHeight < NEAR_PX;
  }

  toEnd() {
    this.list.scrollTop = this.list.scrollHeight;
  }

  // Once a frame is enough, however fast tokens come.
  growLast() {
    if (this.isDue) return;
    this.isDue = true;
    requestAnimationFrame(() => {
      this.isDue = false;
      const { follows } = this;
      this.views.at(-1)?.grow();
      if (follows) this.toEnd();
      else this.toEndButton.hidden = false;
    });
  }

  // After the button that was pressed has gone: on one of the message that took the place of its message.
  focus(id) {
    this.views.find(({ message }) => message.id === id)?.foot.querySelector("button:enabled")?.focus();
  }
}

// What the model is sent: thoughts are left out, as their makers ask.
export function toSend(messages) {
  return messages.map((message) => ({
    role: message.role,
    content: message.role === "user" ? contentOf(message) : message.text,
  }));
}
