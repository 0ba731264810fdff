// A conversation as a tree. Each message follows one other; an answer that was asked for again and a question that was put
// in other words stand beside the old ones, so nothing is lost by either. Shown and sent is one path through the tree.
//
// A message is {id, parent, role: "user" | "assistant", ...}; `id` is its place in `messages`, `parent` an id or -1.

export class Conversation {
  // `end`: id of the last message of the path. `start`: id of the first that the model is sent, 0 for all.
  constructor({ messages = [], end = -1, start = 0 } = {}) {
    this.messages = messages;
    this.end = end;
    this.start = start;
  }

  get record() {
    return { messages: this.messages, end: this.end, start: this.start };
  }

  get path() {
    const path = [];
    for (let id = this.end; id >= 0; id = this.messages[id].parent) path.unshift(this.messages[id]);
    return path;
  }

  // The part of the path that the model is sent: what was left out is before the message `start`.
  get sent() {
    const path = this.path;
    return path.slice(Math.max(0, path.findIndex(({ id }) => id === this.start)));
  }

  add(message) {
    const added = { ...message, id: this.messages.length, parent: this.end };
    this.messages.push(added);
    this.end = added.id;
    return added;
  }

  // Ends the path before a message, so that the next one that is added stands beside it.
  cutBefore(id) {
    this.end = this.messages[id].parent;
  }

  // Takes the newest message away again, which must be the end of the path.
  dropLast() {
    const dropped = this.messages.pop();
    console.assert(dropped.id === this.end, "only the newest message can be dropped");
    this.end = dropped.parent;
  }

  // Ids of the message and of those beside it, oldest first.
  versions(id) {
    const { parent } = this.messages[id];
    return this.messages.filter((message) => message.parent === parent).map((message) => message.id);
  }

  // Leads the path through a message, and from there through the newest ones.
  show(id) {
    this.end = id;
    for (;;) {
      const next = this.messages.findLast((message) => message.parent === this.end);
      if (!next) return;
      this.end = next.id;
    }
  }

  // Questions that the model is sent.
  get numQuestions() {
    return this.sent.filter(({ role }) => role === "user").length;
  }

  // Leaves the older half of the questions out of what is sent, but never the last one. `hasNext`: one will be added.
  leaveOutOldest(hasNext = false) {
    const questions = this.sent.filter(({ role }) => role === "user").map(({ id }) => id);
    if (hasNext) questions.push(this.messages.length);
    this.start = questions[Math.ceil(questions.length / 2)] ?? this.start;
  }
}
