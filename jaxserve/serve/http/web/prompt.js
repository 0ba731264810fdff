// The field of the question: it grows with its text, Enter sends it, and it has the focus wherever a keyboard is at hand.

// A phone's keyboard takes half of the screen, so it comes when the reader wants it, and has no other way to begin a line.
const isTouched = () => matchMedia("(pointer: coarse)").matches;

export class Prompt {
  constructor(field, form) {
    this.field = field;
    this.grows = CSS.supports("field-sizing", "content"); // by the style sheet alone
    if (isTouched()) field.placeholder = "Message";
    field.addEventListener("input", () => this.fit());
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !isTouched()) {
        event.preventDefault();
        form.requestSubmit();
      }
    });
  }

  get text() {
    return this.field.value.trim();
  }

  set text(text) {
    this.field.value = text;
    this.fit();
  }

  fit() {
    if (this.grows) return;
    this.field.style.height = "auto";
    this.field.style.height = `${this.field.scrollHeight + this.field.offsetHeight - this.field.clientHeight}px`;
  }

  // Whether the focus is here now: with a finger it is not asked for.
  focus() {
    if (isTouched()) return false;
    this.field.focus();
    return true;
  }
}
