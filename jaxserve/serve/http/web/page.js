// Puts the page together.

import { Chat } from "./chat.js";
import { keep, recall } from "./kept.js";
import { getMaxLen, getModel, reconnect, startLive } from "./live.js";
import { getKey, setKey } from "./sse.js";

const by = (id) => document.getElementById(id);

// The field for the key is there once the server has asked for one.
function startKey() {
  const form = by("key-form"), field = by("key");
  field.value = getKey();
  form.hidden = field.value === "";
  document.addEventListener("keywanted", () => (form.hidden = false));
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
const showChats = startToggle(by("chats-toggle"), by("chats"), wide.matches);
by("chats").addEventListener("click", ({ target }) => {
  if (!wide.matches && target.closest(".open, #new-chat")) showChats(false); // the chat is below the list there
});
if (matchMedia("(pointer: coarse)").matches) by("prompt").placeholder = "Message";
startToggle(by("live-toggle"), by("live"), true);
by("skip").addEventListener("click", (event) => {
  event.preventDefault(); // the address names the chat
  by("prompt").focus();
});
const chat = new Chat(getModel, getMaxLen);
startLive(() => chat.showContext());
