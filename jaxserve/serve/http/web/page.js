// Puts the page together.

import { Chat } from "./chat.js";
import { keep, recall } from "./kept.js";
import { getModel, reconnect, startLive } from "./live.js";
import { getKey, setKey } from "./sse.js";
import { startViews } from "./views.js";

const by = (id) => document.getElementById(id);

// The field for the key is there while the server asks for one. Once it works it goes, and a button brings it back.
function startKey() {
  const form = by("key-form"), field = by("key"), again = by("key-again");
  const show = (isShown) => {
    const isLeft = form.contains(document.activeElement);
    form.hidden = !isShown;
    again.hidden = isShown || !getKey();
    if (!isShown && isLeft) by("prompt").focus();
  };
  field.value = getKey();
  show(false);
  document.addEventListener("keywanted", () => show(true));
  document.addEventListener("keyworks", ({ detail }) => {
    if (detail === field.value.trim()) show(false); // and not while another one is being typed
  });
  again.addEventListener("click", () => {
    show(true);
    field.select();
  });
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    setKey(field.value);
    reconnect();
  });
}

// A button that opens and closes a part of the page. It stays as the reader left it. Returns what opens and closes it.
function startToggle(button, part, isOpenAtFirst) {
  const set = (isOpen) => {
    part.hidden = !isOpen;
    button.setAttribute("aria-expanded", String(isOpen));
  };
  set(recall(part.id, isOpenAtFirst));
  button.addEventListener("click", () => {
    set(part.hidden);
    keep(part.id, !part.hidden);
  });
  return set;
}

startKey();
const wide = matchMedia("(min-width: 60rem)");
const showView = startViews(wide);
const showChats = startToggle(by("chats-toggle"), by("chats"), wide.matches);
by("chats").addEventListener("click", ({ target }) => {
  if (!wide.matches && target.closest(".open, #new-chat")) showChats(false); // the chat is below the list there
});
by("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the chat
  showView("chat");
  by("prompt").focus();
});
const chat = new Chat(getModel);
startLive(() => chat.meetModel());
chat.prompt.focus();
