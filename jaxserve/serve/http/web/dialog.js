// A question that must be answered before anything else goes on: the page's one <dialog>, which traps and returns the focus.

const by = (id) => document.getElementById(id);

// What was typed into the field, or `true` where none is asked for; null where the reader thought better of it.
export function ask({ question, action, value }) {
  const dialog = by("dialog"), field = by("dialog-field");
  by("dialog-question").textContent = question;
  by("dialog-yes").textContent = action;
  field.hidden = value === undefined;
  field.required = !field.hidden;
  field.value = value ?? "";
  dialog.returnValue = "";
  dialog.showModal();
  if (!field.hidden) field.select();
  return new Promise((resolve) => {
    const ending = new AbortController();
    by("dialog-form").addEventListener("submit", (event) => {
      event.preventDefault();
      dialog.close("yes");
    }, { signal: ending.signal });
    by("dialog-no").addEventListener("click", () => dialog.close(), { signal: ending.signal });
    dialog.addEventListener("close", () => {
      ending.abort();
      if (dialog.returnValue !== "yes") resolve(null);
      else resolve(field.hidden ? true : field.value.trim());
    }, { once: true });
  });
}
