// The system prompt and the options of sampling of a chat, and presets of them. An empty field is not sent, so that the
// server's default for the model holds.

import { ask } from "./dialog.js";
import { keep, recall } from "./kept.js";

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "seed"];
const FIELDS = ["system", ...NUMBERS];
const MOST_PRESETS = 50;
const BUILT_IN = { // of sampling alone: they leave the system prompt and the limits as they are
  "As the model wants": { temperature: "", top_p: "", top_k: "", min_p: "" },
  "Exact": { temperature: "0", top_p: "", top_k: "", min_p: "" },
  "Balanced": { temperature: "0.7", top_p: "0.95", top_k: "", min_p: "" },
  "Inventive": { temperature: "1.1", top_p: "", top_k: "", min_p: "0.05" },
};
const FIRST = { system: "", max_tokens: "", seed: "", ...BUILT_IN.Balanced };

const by = (id) => document.getElementById(id);

export class Settings {
  // `onChange` is called when the reader has changed something.
  constructor(onChange) {
    this.presets = recall("presets", {});
    this.set(recall("settings", FIRST));
    for (const name of FIELDS) {
      by(name).addEventListener("change", () => {
        this.changed();
        onChange();
      });
    }
    by("preset").addEventListener("change", () => {
      const chosen = by("preset").value;
      if (!chosen) return;
      this.set({ ...this.values, ...this.all[chosen] });
      this.changed();
      onChange();
    });
    by("preset-save").addEventListener("click", () => this.savePreset());
    by("preset-delete").addEventListener("click", () => this.deletePreset());
  }

  get all() {
    return { ...BUILT_IN, ...this.presets };
  }

  // Texts of the fields by name.
  get values() {
    return Object.fromEntries(FIELDS.map((name) => [name, by(name).value]));
  }

  set(values) {
    for (const name of FIELDS) by(name).value = values[name] ?? "";
    this.showPresets();
  }

  changed() {
    keep("settings", this.values); // a new chat begins with those of the last
    this.showPresets();
  }

  get system() {
    return by("system").value.trim();
  }

  // Fields of a request.
  get sampling() {
    const given = NUMBERS.filter((name) => by(name).value !== "");
    return Object.fromEntries(given.map((name) => [name, Number(by(name).value)]));
  }

  // The preset whose values the fields have is the chosen one.
  showPresets() {
    const { values, all } = this;
    const same = ([, preset]) => Object.entries(preset).every(([name, value]) => values[name] === value);
    const current = Object.entries(all).findLast(same)?.[0] ?? "";
    const names = Object.keys(all).map((name) => new Option(name, name));
    by("preset").replaceChildren(new Option("Own values", ""), ...names);
    by("preset").value = current;
    by("preset-delete").disabled = !Object.hasOwn(this.presets, current);
  }

  async savePreset() {
    const name = await ask({ question: "Name of the preset, which keeps all fields here", action: "Save", value: "" });
    if (!name) return;
    const presets = { ...this.presets, [name]: this.values };
    const full = Object.keys(presets).length > MOST_PRESETS;
    if (Object.hasOwn(BUILT_IN, name) || full || !keep("presets", presets)) {
      const why = Object.hasOwn(BUILT_IN, name) ? "The page has a preset of that name; take another."
        : full ? `${MOST_PRESETS} presets are kept, which is the most; delete one.` : "This browser keeps nothing of this page.";
      await ask({ question: why, action: "OK" });
      return;
    }
    this.presets = presets;
    this.showPresets();
  }

  async deletePreset() {
    const name = by("preset").value;
    if (!(await ask({ question: `Delete the preset “${name}”?`, action: "Delete" }))) return;
    delete this.presets[name];
    keep("presets", this.presets);
    this.showPresets();
    by("preset").focus();
  }
}
