// Light, dark, or as the system says. The choice is a cookie, so that the server paints the first pixel right.

const CHOICES = ["auto", "light", "dark"] as const;
type Choice = (typeof CHOICES)[number];
const NAMES: Record<Choice, string> = { auto: "as your system", light: "light", dark: "dark" };
const YEAR = 365 * 86_400;

export function themeSwitch(page: Document): void {
  const root = page.documentElement;
  const kept = /(?:^|; )theme=(light|dark)/.exec(page.cookie)?.[1] as Choice | undefined;
  if (kept) root.dataset.theme = kept;
  const button = page.querySelector<HTMLButtonElement>("[data-theme-switch]");
  if (!button) return;
  const show = () => button.setAttribute("aria-label", `Colours: ${NAMES[current(root)]}. Change`);
  button.hidden = false;
  show();
  button.addEventListener("click", () => {
    const next = CHOICES[(CHOICES.indexOf(current(root)) + 1) % CHOICES.length]!;
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    page.cookie = `theme=${next}; path=/; max-age=${next === "auto" ? 0 : YEAR}; samesite=lax`;
    show();
    page.dispatchEvent(new Event("themechange"));
  });
}

function current(root: HTMLElement): Choice {
  const choice = root.dataset.theme;
  return choice === "light" || choice === "dark" ? choice : "auto";
}

/** Calls back whenever the colours change, by the switch or by the system. */
export function onThemeChange(page: Document, listener: () => void): void {
  page.addEventListener("themechange", listener);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}
