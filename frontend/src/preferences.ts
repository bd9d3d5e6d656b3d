// What a reader of the run page has selected, stored in this browser only.

import type { XAxis } from "./chartAxes";
import { DEFAULT_SMOOTHING } from "./movingAverage";

/** The selectable options of the run page. */
export interface Preferences {
  xAxis: XAxis;
  yScale: "linear" | "log";
  /** What the loss chart shows: nats per token, or one of two values that follow from it. */
  lossUnit: "loss" | "perplexity" | "bits";
  /** The weight of the moving average, 0 to 0.99; 0: none. */
  smoothing: number;
  /** Whether a few far values may lie outside the y axis. */
  ignoreOutliers: boolean;
  /** Which curves the loss chart shows. */
  trainCurve: boolean;
  validationCurve: boolean;
  machineCurves: boolean;
  /** Whether tokens/s are stacked by machine. */
  machineRates: boolean;
  /** Whether the list of events includes machines that join and leave. */
  machineEvents: boolean;
  /** Whether the list of events includes checkpoints. */
  checkpointEvents: boolean;
}

export const DEFAULTS: Preferences = {
  xAxis: "tokens",
  yScale: "linear",
  lossUnit: "loss",
  smoothing: DEFAULT_SMOOTHING,
  ignoreOutliers: true,
  trainCurve: true,
  validationCurve: true,
  machineCurves: false,
  machineRates: false,
  machineEvents: true,
  checkpointEvents: false,
};

const ALLOWED_WORDS: Partial<Record<keyof Preferences, readonly string[]>> = {
  xAxis: ["tokens", "steps", "time", "active"],
  yScale: ["linear", "log"],
  lossUnit: ["loss", "perplexity", "bits"],
};
const MAX_SMOOTHING = 0.99;
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
  if (name === "smoothing") {
    return typeof value === "number" && value >= 0 && value <= MAX_SMOOTHING;
  }
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
  private readonly controls: Control[];
  private readonly listeners: (() => void)[] = [];

  constructor(
    page: HTMLElement,
    linked: Partial<Preferences> = {},
    private readonly storage: Storage | null = findStorage(),
  ) {
    const stored = parsePreferences(storage?.getItem(STORAGE_KEY) ?? null);
    this.value = { ...stored, ...linked };
    this.controls = [...page.querySelectorAll<Control>("[data-preference]")];
    for (const control of this.controls) showPreference(control, this.value);
    page.addEventListener("change", (event) => this.update(event.target as HTMLElement));
    // A slider is followed while it is dragged.
    page.addEventListener("input", (event) => {
      const control = event.target as HTMLInputElement;
      if (control.type === "range") this.update(control);
    });
  }

  /** Call `listener` after each change. */
  onChange(listener: () => void): void {
    this.listeners.push(listener);
  }

  private update(control: HTMLElement): void {
    const name = control.dataset.preference;
    if (!name) return;
    const value = readControl(control as Control);
    this.value = parsePreferences(JSON.stringify({ ...this.value, [name]: value }));
    this.storage?.setItem(STORAGE_KEY, JSON.stringify(this.value));
    for (const other of this.controls) showPreference(other, this.value);
    for (const listener of this.listeners) listener();
  }
}

function readControl(control: Control): boolean | number | string {
  if (!(control instanceof HTMLInputElement)) return control.value;
  return control.type === "range" ? control.valueAsNumber : control.checked;
}

function showPreference(control: Control, preferences: Preferences): void {
  const value = preferences[control.dataset.preference as keyof Preferences];
  if (control instanceof HTMLInputElement && control.type === "checkbox") {
    control.checked = value === true;
  } else if (control.value !== String(value)) {
    control.value = String(value);
  }
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
