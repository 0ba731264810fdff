// Text into the clipboard, and the buttons that put it there.

const SAID_MS = 1500;

async function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  // Over plain http from another machine there is only the old way: what is selected is copied.
  const field = document.createElement("textarea"), focused = document.activeElement;
  field.value = text;
  field.className = "hidden";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  focused?.focus();
  if (!done) throw new Error("the browser does not let the page copy");
}

// `getText` is asked when the button is pressed; `what` is copied, for readers who do not see where the button stands.
export function copyButton(getText, what) {
  const button = document.createElement("button"), said = document.createElement("span"), hidden = document.createElement("span");
  button.type = "button";
  button.className = "small";
  said.textContent = "Copy";
  hidden.className = "hidden";
  hidden.textContent = ` ${what}`;
  button.append(said, hidden);
  button.addEventListener("click", async () => {
    try {
      await copy(getText());
      said.textContent = "Copied";
    } catch {
      said.textContent = "Not allowed: copy";
    }
    setTimeout(() => (said.textContent = "Copy"), SAID_MS);
  });
  return button;
}
