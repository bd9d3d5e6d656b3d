// The colour theme: light, dark, or the system's. A cookie stores it, so that the server renders
// the page in the right colours at once.

const THEMES = ["auto", "light", "dark"] as const;
type Theme = (typeof THEMES)[number];

const LABELS: Record<Theme, string> = { auto: "as your system", light: "light", dark: "dark" };
const YEAR_SECONDS = 365 * 86_400;
const THEME_COOKIE = /(?:^|; )theme=(light|dark)/;
const THEME_CHANGE = "themechange"; // the event's name

/** Apply the stored theme, and let the button with `data-theme-switch` change it. */
export function enableThemeSwitch(page: Document): void {
  const root = page.documentElement;
  const stored = THEME_COOKIE.exec(page.cookie)?.[1];
  if (stored) root.dataset.theme = stored;
  const button = page.querySelector<HTMLButtonElement>("[data-theme-switch]");
  if (!button) return;
  const updateLabel = () => {
    button.setAttribute("aria-label", `Colours: ${LABELS[currentTheme(root)]}. Change`);
  };
  button.hidden = false;
  updateLabel();
  button.addEventListener("click", () => {
    const next = THEMES[(THEMES.indexOf(currentTheme(root)) + 1) % THEMES.length]!;
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    const maxAge = next === "auto" ? 0 : YEAR_SECONDS;
    page.cookie = `theme=${next}; path=/; max-age=${maxAge}; samesite=lax`;
    updateLabel();
    page.dispatchEvent(new Event(THEME_CHANGE));
  });
}

function currentTheme(root: HTMLElement): Theme {
  const theme = root.dataset.theme;
  return theme === "light" || theme === "dark" ? theme : "auto";
}

/** Call `listener` after the colours have changed, by the switch or by the system. */
export function onThemeChange(page: Document, listener: () => void): void {
  page.addEventListener(THEME_CHANGE, listener);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", listener);
}
