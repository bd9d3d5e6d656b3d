// Asks before what cannot be undone.

export function confirmations(page: Document): void {
  page.addEventListener("submit", (event) => {
    const question = (event.target as HTMLElement).dataset.confirm;
    if (question && !window.confirm(question)) event.preventDefault();
  });
}

/** A menu closes by Escape and by a click elsewhere, as people expect of one. */
export function menus(page: Document): void {
  const open = () => page.querySelector<HTMLDetailsElement>("details.menu[open]");
  page.addEventListener("click", (event) => {
    const menu = open();
    if (menu && !menu.contains(event.target as Node)) menu.open = false;
  });
  page.addEventListener("keydown", (event) => {
    const menu = open();
    if (event.key !== "Escape" || !menu) return;
    menu.open = false;
    menu.querySelector("summary")?.focus();
  });
}
