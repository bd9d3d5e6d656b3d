// Menus that are `details` elements.

/** Close an open menu on Escape and on a click outside of it. */
export function enableMenuClosing(page: Document): void {
  const findOpenMenu = () => page.querySelector<HTMLDetailsElement>("details.menu[open]");
  page.addEventListener("click", (event) => {
    const menu = findOpenMenu();
    if (menu && !menu.contains(event.target as Node)) menu.open = false;
  });
  page.addEventListener("keydown", (event) => {
    const menu = findOpenMenu();
    if (event.key !== "Escape" || !menu) return;
    menu.open = false;
    menu.querySelector("summary")?.focus();
  });
}
