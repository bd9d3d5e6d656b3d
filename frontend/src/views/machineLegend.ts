// The legend of the machines' curves: line style, name and loss of each machine.

import { setText } from "../dom";
import { formatLoss } from "../format";
import type { WorkerCurve } from "../types";
import { lineStyle, type LineStyle } from "./lineStyles";

const SVG = "http://www.w3.org/2000/svg";
const SAMPLE_WIDTH = 26; // pixels
const SAMPLE_HEIGHT = 4;

/** Lists the machines whose curves are drawn. */
export class MachineLegend {
  private values: HTMLElement[] = [];
  private shownMachines = "";

  constructor(private readonly list: HTMLElement) {}

  /** List these machines; nothing changes if they are listed already. */
  show(curves: WorkerCurve[]): void {
    const machines = JSON.stringify(curves.map((curve) => [curve.id, curve.name]));
    if (machines === this.shownMachines) return;
    this.shownMachines = machines;
    this.values = [];
    this.list.replaceChildren(...curves.map((curve, i) => this.createItem(curve, lineStyle(i))));
    this.list.hidden = curves.length === 0;
  }

  /** Show a loss for each machine, in the order of the curves. */
  showValues(values: string[]): void {
    values.forEach((text, i) => setText(this.values[i], text));
  }

  private createItem(curve: WorkerCurve, style: LineStyle): HTMLElement {
    const name = document.createElement("span");
    name.className = "legend-name";
    name.textContent = curve.name;
    const value = document.createElement("b");
    value.textContent = formatLoss(curve.points.at(-1)?.[1]);
    this.values.push(value);
    const item = document.createElement("span");
    item.append(createSample(style), name, value);
    return item;
  }
}

/** Create a drawing of a short line in this style. */
function createSample({ colour, dash }: LineStyle): SVGElement {
  const line = createSvgElement("line", {
    class: colour.slice("--".length), // the class sets the stroke to the property of the same name
    x1: 0,
    x2: SAMPLE_WIDTH,
    y1: SAMPLE_HEIGHT / 2,
    y2: SAMPLE_HEIGHT / 2,
    "stroke-width": 2,
    "stroke-dasharray": dash.join(" "),
  });
  const sample = createSvgElement("svg", {
    viewBox: `0 0 ${SAMPLE_WIDTH} ${SAMPLE_HEIGHT}`,
    width: SAMPLE_WIDTH,
    height: SAMPLE_HEIGHT,
  });
  sample.append(line);
  return sample;
}

function createSvgElement(tag: string, attributes: Record<string, string | number>): SVGElement {
  const element = document.createElementNS(SVG, tag) as SVGElement;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}
