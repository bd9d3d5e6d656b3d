// What a reader of the run page chose last, kept in this browser alone.

import type { XAxis } from "./chartAxes";

export interface Preferences {
  across: XAxis;
  scale: "linear" | "log";
  smoothing: "none" | "some" | "much";
  /** Which lines are drawn. */
  train: boolean;
  validation: boolean;
  machines: boolean;
  /** Whether the events list tells of machines coming and going. */
  comings: boolean;
}

export const DEFAULTS: Preferences = {
  across: "tokens",
  scale: "linear",
  smoothing: "some",
  train: true,
  validation: true,
  machines: false,
  comings: true,
};

const WORDS: Partial<Record<keyof Preferences, readonly string[]>> = {
  across: ["tokens", "steps", "time"],
  scale: ["linear", "log"],
  smoothing: ["none", "some", "much"],
};
const KEY = "barnraise.run-page";

/** Whatever is kept: what makes no sense, or is not said, is as by default. */
export function read(kept: string | null): Preferences {
  const found: Record<string, unknown> = { ...DEFAULTS };
  for (const [name, value] of Object.entries(parsed(kept))) {
    const words = WORDS[name as keyof Preferences];
    if (words ? words.includes(value as string) : name in DEFAULTS && typeof value === "boolean") found[name] = value;
  }
  return found as unknown as Preferences;
}

function parsed(kept: string | null): object {
  try {
    const value: unknown = JSON.parse(kept ?? "{}");
    return typeof value === "object" && value !== null ? value : {};
  } catch (error) {
    if (error instanceof SyntaxError) return {};
    throw error;
  }
}

/** The controls that are named after choices, within one part of the page: they show what is chosen, and change it. */
export class PreferenceControls {
  value: Preferences;
  private listeners: (() => void)[] = [];

  constructor(private readonly page: HTMLElement, private readonly kept: Storage | null = storage()) {
    this.value = read(kept?.getItem(KEY) ?? null);
    for (const control of this.controls()) show(control, this.value);
    page.addEventListener("change", (event) => this.changed(event.target as HTMLElement));
  }

  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  private controls(): Control[] {
    return [...this.page.querySelectorAll<Control>("[data-choice]")];
  }

  private changed(control: HTMLElement): void {
    const name = control.dataset.choice;
    if (!name) return;
    const value = control instanceof HTMLInputElement ? control.checked : (control as HTMLSelectElement).value;
    this.value = read(JSON.stringify({ ...this.value, [name]: value }));
    this.kept?.setItem(KEY, JSON.stringify(this.value));
    for (const listener of this.listeners) listener();
  }
}

type Control = HTMLInputElement | HTMLSelectElement;

function show(control: Control, choices: Preferences): void {
  const value = choices[control.dataset.choice as keyof Preferences];
  if (control instanceof HTMLInputElement) control.checked = value === true;
  else control.value = String(value);
}

/** Null where the browser keeps nothing for pages. */
function storage(): Storage | null {
  try {
    return window.localStorage;
  } catch (error) {
    if (error instanceof DOMException) return null;
    throw error;
  }
}
