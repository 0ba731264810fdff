// Light or dark: as the system has it, or as the reader chose. No module, so that it runs before the first paint.
(() => {
  const NAME = "jaxserve-theme";
  const dark = matchMedia("(prefers-color-scheme: dark)");
  let choice = "";
  try {
    choice = localStorage.getItem(NAME) ?? "";
  } catch { /* a browser that keeps nothing: as the system has it */ }

  function apply() {
    document.documentElement.dataset.theme = choice || (dark.matches ? "dark" : "light");
    document.dispatchEvent(new Event("themechange")); // canvases have to be drawn again
  }

  apply();
  dark.addEventListener("change", apply);
  document.addEventListener("DOMContentLoaded", () => {
    const menu = document.getElementById("theme");
    menu.value = choice;
    menu.addEventListener("change", () => {
      choice = menu.value;
      apply();
      try {
        localStorage.setItem(NAME, choice);
      } catch { /* then it holds until the page is closed */ }
    });
  });
})();
