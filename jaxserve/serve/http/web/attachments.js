// What goes with a message: pictures and text files, chosen, dropped on the form or pasted into its field. They are shown until
// the message is sent, and then stay in it: pictures as data: URLs, files as text.

const PICTURES = ["image/png", "image/jpeg", "image/webp"];
const MOST_BYTES = 1 << 20; // of a text file; a server takes 4 MiB of a whole request by default

function readUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.addEventListener("load", () => resolve(reader.result));
    reader.addEventListener("error", () => reject(reader.error));
    reader.readAsDataURL(file);
  });
}

// Throws an Error that says why a file cannot be attached.
async function readText(file) {
  if (file.size > MOST_BYTES) throw new Error(`${file.name} has ${size(file.size)}; a text file may have ${size(MOST_BYTES)}`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch (error) {
    if (!(error instanceof TypeError)) throw new Error(`${file.name} cannot be read`);
  }
  throw new Error(`${file.name} is neither text in UTF-8 nor a picture (PNG, JPEG, WebP)`);
}

const size = (bytes) => (bytes < 1024 ? `${bytes} bytes` : `${(bytes / 1024).toFixed(bytes < 10240 ? 1 : 0)} KiB`);

export function pictureElement(url, alt) {
  const image = document.createElement("img");
  image.src = url;
  image.alt = alt;
  return image;
}

// A file in a message, folded.
export function fileElement({ name, text }) {
  const made = document.createElement("details"), title = document.createElement("summary"), body = document.createElement("pre");
  made.className = "file";
  title.textContent = `${name}, ${size(new Blob([text]).size)}`;
  body.tabIndex = 0;
  body.setAttribute("role", "group");
  body.setAttribute("aria-label", name);
  body.textContent = text;
  made.append(title, body);
  return made;
}

// What the model is sent of a message: its files in fences that nothing in them closes, its text; and pictures before both.
export function contentOf({ text, files, pictures }) {
  const fenced = files.map((file) => {
    const longest = Math.max(2, ...(file.text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    return `File ${file.name}:\n${fence}\n${file.text.replace(/\n$/, "")}\n${fence}\n\n`;
  });
  const whole = fenced.join("") + text;
  if (!pictures.length) return whole;
  const shown = pictures.map((url) => ({ type: "image_url", image_url: { url } }));
  return whole ? [...shown, { type: "text", text: whole }] : shown;
}

export class Attachments {
  // `complain` is given the text of an error, or null once there is none; `seesPictures` tells whether the model
  // does, null while that is not known.
  constructor({ form, field, list, chooser, button, complain, seesPictures }) {
    this.list = list;
    this.seesPictures = seesPictures;
    this.complain = complain;
    this.pictures = [];
    this.files = [];
    button.addEventListener("click", () => chooser.click());
    chooser.addEventListener("change", async () => {
      await this.add(chooser.files);
      chooser.value = ""; // the same file may be chosen again
    });
    form.addEventListener("dragover", (event) => {
      if (event.dataTransfer.types.includes("Files")) event.preventDefault();
    });
    form.addEventListener("drop", (event) => {
      if (!event.dataTransfer.files.length) return;
      event.preventDefault();
      this.add(event.dataTransfer.files);
    });
    field.addEventListener("paste", (event) => {
      if (!event.clipboardData.files.length) return;
      event.preventDefault();
      this.add(event.clipboardData.files);
    });
  }

  async add(files) {
    this.complain(null);
    for (const file of [...files]) {
      try {
        const isPicture = PICTURES.includes(file.type);
        if (isPicture && this.seesPictures() === false) throw new Error(`${file.name} is a picture, and this model sees none`);
        if (isPicture) this.pictures.push(await readUrl(file));
        else this.files.push({ name: file.name, text: await readText(file) });
      } catch (error) {
        this.complain(error.message);
      }
    }
    this.show();
  }

  get isEmpty() {
    return !this.pictures.length && !this.files.length;
  }

  // Those of a message that is sent, which has no more from now on.
  take() {
    const { pictures, files } = this;
    this.set({ pictures: [], files: [] });
    return { pictures, files };
  }

  set({ pictures, files }) {
    this.pictures = [...pictures];
    this.files = [...files];
    this.show();
  }

  show() {
    const entry = (shown, name, all, index) => {
      const item = document.createElement("li"), remove = document.createElement("button");
      remove.type = "button";
      remove.className = "small";
      remove.textContent = "Remove";
      remove.setAttribute("aria-label", `Remove ${name}`);
      remove.addEventListener("click", () => {
        all.splice(index, 1);
        this.show();
      });
      item.append(shown, remove);
      return item;
    };
    const pictures = this.pictures.map((url, index) => {
      const name = `picture ${index + 1}`;
      return entry(pictureElement(url, name), name, this.pictures, index);
    });
    const files = this.files.map((file, index) => entry(fileElement(file), file.name, this.files, index));
    this.list.replaceChildren(...pictures, ...files);
    this.list.hidden = !this.list.childElementCount;
  }
}
