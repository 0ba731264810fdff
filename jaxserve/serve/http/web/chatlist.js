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
    filter.addEventListener("input", () => this.draw());
  }

  // `heads` of chats, `current`: id of the one that is shown, `running`: has the ids of those that are being answered.
  show(heads, current, running) {
    this.given = { heads, current, running };
    this.filter.hidden = heads.length < MANY;
    if (this.filter.hidden) this.filter.value = "";
    this.draw();
  }

  draw() {
    const { heads, current, running } = this.given;
    const hadFocus = this.list.contains(document.activeElement);
    const wanted = this.filter.value.trim().toLowerCase();
    const shown = heads.filter(({ title }) => title.toLowerCase().includes(wanted));
    this.list.replaceChildren(...shown.map((head) => this.entry(head, head.id === current, running.has(head.id))));
    if (hadFocus) this.list.querySelector("[aria-current]")?.focus();
  }

  entry({ id, title, changed }, isCurrent, isRunning) {
    const item = document.createElement("li"), time = document.createElement("span");
    const open = button(title, "open", () => this.actions.open(id));
    time.className = "when";
    time.textContent = isRunning ? "is being answered" : when(changed);
    open.append(time);
    item.append(open);
    if (isCurrent) { // of the others, too, it would be four stops of the keyboard for each
      open.setAttribute("aria-current", "true");
      const row = document.createElement("div");
      row.className = "foot";
      row.append(button("Rename", "small", () => this.actions.rename(id, title)),
        button("Download", "small", () => this.actions.download()),
        button("Delete", "small", () => this.actions.remove(id, title)));
      item.append(row);
    }
    return item;
  }
}
