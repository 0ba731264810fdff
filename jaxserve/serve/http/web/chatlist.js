// The chats that this browser keeps, as a list beside the one that is shown, and a field that picks those of some title.

const MANY = 8; // from so many on, the field is there

function button(text, className, onClick) {
  const made = document.createElement("button");
  made.type = "button";
  made.className = className;
  made.textContent = text;
  made.addEventListener("click", onClick);
  return made;
}

// "14:05" of today, otherwise the day.
function when(ms) {
  const date = new Date(ms), today = new Date();
  if (date.toDateString() === today.toDateString()) {
    return date.toLocaleTimeString([], { hour: "2-digit", minute: "2-digit" });
  }
  return date.toLocaleDateString([], { year: "numeric", month: "short", day: "numeric" });
}

export class ChatList {
  // `actions`: open(id), rename(id, title), download() of the current one, remove(id, title).
  constructor(list, filter, actions) {
    this.list = list;
    this.filter = filter;
    this.actions = actions;
    this.given = { heads: [], current: "", running: new Map() };
    this.items = new Map(); // id of a chat -> its <li>
    filter.addEventListener("input", () => this.draw());
  }

  // `heads` of chats, `current`: id of the one that is shown, `running`: has the ids of those that are being answered.
  show(heads, current, running) {
    this.given = { heads, current, running };
    this.filter.hidden = heads.length < MANY;
    if (this.filter.hidden) this.filter.value = "";
    this.draw();
  }

  // Whoever stands on a button by keyboard stays on it: an answer that grows is saved, and the list drawn, every other second.
  draw() {
    const { heads, current, running } = this.given, focused = document.activeElement;
    const hadFocus = this.list.contains(focused);
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = heads.filter(({ title }) => title.toLowerCase().includes(wanted));
    this.items = new Map(shown.map((head) => [head.id, this.items.get(head.id) ?? this.item(head.id)]));
    for (const head of shown) this.update(this.items.get(head.id), head, head.id === current, running.has(head.id));
    this.list.replaceChildren(...this.items.values());
    if (hadFocus) (this.list.contains(focused) ? focused : this.list.querySelector("[aria-current]"))?.focus();
  }

  item(id) {
    const item = document.createElement("li"), open = button("", "open", () => this.actions.open(id));
    const title = document.createElement("span"), time = document.createElement("span");
    time.className = "when";
    open.append(title, time);
    item.append(open);
    return item;
  }

  update(item, { id, title, changed }, isCurrent, isRunning) {
    const [open, row] = item.children, [name, time] = open.children;
    name.textContent = title;
    time.textContent = isRunning ? "is being answered" : when(changed);
    if (isCurrent) open.setAttribute("aria-current", "true");
    else open.removeAttribute("aria-current");
    if (isCurrent && !row) item.append(this.buttons(id)); // of the others, too, it would be four stops of the keyboard for each
    if (!isCurrent) row?.remove();
  }

  buttons(id) {
    const row = document.createElement("div"), title = () => this.given.heads.find((head) => head.id === id).title;
    row.className = "foot";
    row.append(button("Rename", "small", () => this.actions.rename(id, title())),
      button("Download", "small", () => this.actions.download()),
      button("Delete", "small", () => this.actions.remove(id, title())));
    return row;
  }
}
