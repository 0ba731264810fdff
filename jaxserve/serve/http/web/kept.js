// Small choices of the reader, kept in localStorage. A browser that keeps nothing forgets them with the page.

export function recall(name, otherwise) {
  try {
    return JSON.parse(localStorage.getItem(`jaxserve-${name}`)) ?? otherwise;
  } catch { // nothing may be kept here, or what is kept was not written by this page
    return otherwise;
  }
}

export function keep(name, value) {
  try {
    localStorage.setItem(`jaxserve-${name}`, JSON.stringify(value));
    return true;
  } catch {
    return false;
  }
}
