// What a reader of the run page has selected, stored in this browser only.

import type { XAxis } from "./chartAxes";

/** The selectable options of the run page. */
export interface Preferences {
  xAxis: XAxis;
  yScale: "linear" | "log";
  smoothing: "none" | "some" | "strong";
  /** Which curves the loss chart shows. */
  trainCurve: boolean;
  validationCurve: boolean;
  machineCurves: boolean;
  /** Whether the list of events includes machines that join and leave. */
  machineEvents: boolean;
}

export const DEFAULTS: Preferences = {
  xAxis: "tokens",
  yScale: "linear",
  smoothing: "some",
  trainCurve: true,
  validationCurve: true,
  machineCurves: false,
  machineEvents: true,
};

const ALLOWED_WORDS: Partial<Record<keyof Preferences, readonly string[]>> = {
  xAxis: ["tokens", "steps", "time"],
  yScale: ["linear", "log"],
  smoothing: ["none", "some", "strong"],
};
const STORAGE_KEY = "barnraise.run-page";

type Control = HTMLInputElement | HTMLSelectElement;

/** Parse stored preferences; a value that is absent or not allowed becomes its default. */
export function parsePreferences(stored: string | null): Preferences {
  const preferences: Record<string, unknown> = { ...DEFAULTS };
  for (const [name, value] of Object.entries(parseObject(stored))) {
    if (isAllowed(name, value)) preferences[name] = value;
  }
  return preferences as unknown as Preferences;
}

function isAllowed(name: string, value: unknown): boolean {
  const words = ALLOWED_WORDS[name as keyof Preferences];
  if (words) return words.includes(value as string);
  return name in DEFAULTS && typeof value === "boolean";
}

function parseObject(stored: string | null): object {
  try {
    const value: unknown = JSON.parse(stored ?? "{}");
    return typeof value === "object" && value !== null ? value : {};
  } catch (error) {
    if (error instanceof SyntaxError) return {};
    throw error;
  }
}

/** The form controls with `data-preference`: they show the stored preferences and change them. */
export class PreferenceControls {
  value: Preferences;
  private readonly listeners: (() => void)[] = [];

  constructor(
    page: HTMLElement,
    private readonly storage: Storage | null = findStorage(),
  ) {
    this.value = parsePreferences(storage?.getItem(STORAGE_KEY) ?? null);
    for (const control of page.querySelectorAll<Control>("[data-preference]")) {
      showPreference(control, this.value);
    }
    page.addEventListener("change", (event) => this.update(event.target as HTMLElement));
  }

  /** Call `listener` after each change. */
  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  private update(control: HTMLElement): void {
    const name = control.dataset.preference;
    if (!name) return;
    const isCheckbox = control instanceof HTMLInputElement;
    const value = isCheckbox ? control.checked : (control as HTMLSelectElement).value;
    this.value = parsePreferences(JSON.stringify({ ...this.value, [name]: value }));
    this.storage?.setItem(STORAGE_KEY, JSON.stringify(this.value));
    for (const listener of this.listeners) listener();
  }
}

function showPreference(control: Control, preferences: Preferences): void {
  const value = preferences[control.dataset.preference as keyof Preferences];
  if (control instanceof HTMLInputElement) control.checked = value === true;
  else control.value = String(value);
}

/** Return the browser's storage, or null if the browser does not let pages store anything. */
function findStorage(): Storage | null {
  try {
    return window.localStorage;
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}
