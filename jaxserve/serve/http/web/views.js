// What of the page is shown: the chat, the engine, or on a wide screen both, as tabs. The choice is kept.

import { keep, recall } from "./kept.js";

const by = (id) => document.getElementById(id);

const PARTS = { chat: ["talk"], engine: ["live"], both: ["talk", "live"] };

// `wide`: a MediaQueryList, which matches where there is room for both. Returns what shows a view, unless the part that it is
// about is shown already.
export function startViews(wide) {
  const tabs = Object.keys(PARTS).map((name) => by(`tab-${name}`));
  const name = (tab) => tab.id.slice("tab-".length);
  let chosen = recall("view", "chat");
  if (!Object.hasOwn(PARTS, chosen)) chosen = "chat";

  const show = () => {
    const shown = chosen === "both" && !wide.matches ? "chat" : chosen;
    by("tab-both").hidden = !wide.matches;
    for (const tab of tabs) {
      const isShown = name(tab) === shown;
      tab.setAttribute("aria-selected", String(isShown));
      tab.tabIndex = isShown ? 0 : -1; // one stop of the keyboard; arrows lead to the others
    }
    for (const part of PARTS.both) by(part).hidden = !PARTS[shown].includes(part);
    by("chats-toggle").hidden = by("talk").hidden;
    document.querySelector("main").dataset.view = shown;
  };
  const choose = (tab) => {
    chosen = name(tab);
    keep("view", chosen);
    show();
  };
  for (const tab of tabs) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", ({ key }) => {
      const there = tabs.filter((one) => !one.hidden), place = there.indexOf(tab);
      const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: -1 }[key];
      if (next === undefined) return;
      const other = there.at(next % there.length);
      choose(other);
      other.focus();
    });
  }
  wide.addEventListener("change", show);
  show();
  return (view) => {
    if (!PARTS[view].every((part) => by(part).hidden)) return;
    choose(by(`tab-${view}`));
  };
}
