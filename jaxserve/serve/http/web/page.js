// Puts the page together.

import { startChat } from "./chat.js";
import { getMaxLen, getModel, reconnect, startLive } from "./live.js";
import { getKey, setKey } from "./sse.js";

const field = document.getElementById("key");
field.value = getKey();
document.getElementById("key-form").hidden = field.value === ""; // until the server asks for one
document.getElementById("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(field.value);
  reconnect();
});
startChat(getModel, getMaxLen);
startLive();
