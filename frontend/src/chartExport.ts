// What readers save of a chart: its values as CSV, its drawing as PNG, and the address of the view.

import type { XAxis } from "./chartAxes";
import { parsePreferences, type Preferences } from "./preferences";
import type { Section } from "./chartGroup";

/** A table of a chart's values: a name and a column for the x axis and for each curve. */
export interface ChartTable {
  names: string[];
  columns: (number | null)[][];
}

/** The preferences that an address may contain, by their names there. */
const LINKED = {
  x: "xAxis",
  y: "yScale",
  unit: "lossUnit",
  smooth: "smoothing",
  outliers: "ignoreOutliers",
  train: "trainCurve",
  validation: "validationCurve",
  machines: "machineCurves",
  rates: "machineRates",
} as const satisfies Record<string, keyof Preferences>;

/** Write a table as CSV. Times on the x axis are in ISO 8601. */
export function formatCsv(table: ChartTable, xAxis: XAxis): string {
  const rows = table.columns[0]!.map((x, row) => {
    const first = xAxis === "time" && x !== null ? new Date(x * 1000).toISOString() : x;
    return [first, ...table.columns.slice(1).map((column) => column[row])];
  });
  return [table.names, ...rows].map((row) => row.map(quoteCell).join(",")).join("\r\n") + "\r\n";
}

/** Quote a cell; a text that a spreadsheet would run as a formula becomes plain text. */
function quoteCell(cell: string | number | null | undefined): string {
  if (cell === null || cell === undefined) return "";
  if (typeof cell === "number") return String(cell);
  const text = /^[=+@\t\r-]/.test(cell) ? `'${cell}` : cell;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** Write a view as the fragment of an address. */
export function formatView(preferences: Preferences, zoom: Section | null): string {
  const view = new URLSearchParams();
  for (const [name, preference] of Object.entries(LINKED)) {
    view.set(name, String(preferences[preference]));
  }
  if (zoom) {
    view.set("from", String(Number(zoom[0].toPrecision(12))));
    view.set("to", String(Number(zoom[1].toPrecision(12))));
  }
  return `#${view}`;
}

/** Read a view from the fragment of an address; what is absent or not allowed is left out. */
export function parseView(fragment: string): { values: Partial<Preferences>; zoom: Section | null } {
  const view = new URLSearchParams(fragment.replace(/^#/, ""));
  const given: Record<string, unknown> = {};
  for (const [name, preference] of Object.entries(LINKED)) {
    const text = view.get(name);
    if (text !== null) given[preference] = parseWord(text);
  }
  const allowed = parsePreferences(JSON.stringify(given));
  const names = Object.keys(given) as (keyof Preferences)[];
  const values = Object.fromEntries(
    names.filter((name) => allowed[name] === given[name]).map((name) => [name, allowed[name]]),
  );
  const [from, to] = [view.get("from"), view.get("to")].map((text) => Number(text ?? NaN));
  const zoom: Section | null = from! < to! ? [from!, to!] : null;
  return { values, zoom };
}

function parseWord(text: string): unknown {
  if (text === "true" || text === "false") return text === "true";
  const number = Number(text);
  return text !== "" && Number.isFinite(number) ? number : text;
}

/** Let the browser save a file. */
export function saveFile(name: string, content: Blob): void {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(content);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

/** Turn a title into the name of a file: "Tokens/s" → "tokens-s". */
export function fileName(...parts: string[]): string {
  const words = parts.join(" ").toLowerCase().normalize("NFKD").replace(/\p{M}/gu, "");
  return words.replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "") || "chart";
}
