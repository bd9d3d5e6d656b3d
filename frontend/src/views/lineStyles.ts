// By what machines' lines are told apart: an ink and a dash each, so that it does not take colours to tell.

import { loss } from "../format";
import type { WorkerCurve } from "../types";

const INKS = ["--machine-0", "--machine-1", "--machine-2"] as const;
const DASHES: readonly (readonly number[])[] = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

export interface LineStyle {
  /** A custom property of the page's colours. */
  ink: (typeof INKS)[number];
  dash: number[];
}

/** Of the first twelve lines no two have the same; the first few differ in both. */
export function lineStyle(index: number): LineStyle {
  const round = Math.floor(index / DASHES.length);
  return { ink: INKS[(index + round) % INKS.length]!, dash: [...DASHES[index % DASHES.length]!] };
}

/** The machines' names beside what their lines look like, and what they stand at. */
export class MachineLegend {
  private values: HTMLElement[] = [];
  private names = "";

  constructor(private readonly place: HTMLElement) {}

  show(lines: WorkerCurve[]): void {
    const names = JSON.stringify(lines.map((line) => [line.id, line.name]));
    if (names === this.names) return;
    this.names = names;
    this.values = [];
    this.place.replaceChildren(...lines.map((line, i) => this.item(line, lineStyle(i))));
    this.place.hidden = lines.length === 0;
  }

  read(values: string[]): void {
    values.forEach((text, i) => {
      const place = this.values[i];
      if (place && place.textContent !== text) place.textContent = text;
    });
  }

  private item(line: WorkerCurve, drawn: LineStyle): HTMLElement {
    const item = document.createElement("span");
    const name = document.createElement("span");
    const value = document.createElement("b");
    name.textContent = line.name;
    name.className = "machine-line";
    value.textContent = loss(line.points.at(-1)?.[1]);
    item.append(stroke(drawn), name, value);
    this.values.push(value);
    return item;
  }
}

function stroke({ ink, dash }: LineStyle): SVGElement {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", "0 0 26 4");
  svg.setAttribute("width", "26");
  svg.setAttribute("height", "4");
  const line = document.createElementNS("http://www.w3.org/2000/svg", "line");
  const place = { class: ink.slice(2), x1: 0, x2: 26, y1: 2, y2: 2, "stroke-width": 2, "stroke-dasharray": dash.join(" ") };
  for (const [name, value] of Object.entries(place)) line.setAttribute(name, String(value));
  svg.append(line);
  return svg;
}
