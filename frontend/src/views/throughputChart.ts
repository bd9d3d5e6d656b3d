// Tokens a second over time, all machines together.

import type uPlot from "uplot";
import { count, mark } from "../format";
import type { Store } from "../store";
import type { Point } from "../types";
import { axis, clock, colour, Plot, timeAxis } from "./plot";

export class ThroughputChart {
  private readonly plot: Plot;
  private readonly at: HTMLElement;
  private readonly rate: HTMLElement;
  private points: Point[] = [];

  constructor(place: HTMLElement) {
    this.at = place.querySelector("[data-read=at]")!;
    this.rate = place.querySelector("[data-read=rate]")!;
    const empty = place.querySelector<HTMLElement>("[data-empty]")!;
    this.plot = new Plot(place.querySelector("[data-plot]")!, empty, () => options(), (index) => this.read(index));
  }

  draw(store: Store): void {
    this.points = store.series.rate;
    this.plot.show([this.points.map((p) => p[0]), this.points.map((p) => p[1])]);
  }

  private read(index: number | null): string {
    const point = index === null ? this.points.at(-1) : this.points[index];
    this.at.textContent = point ? clock(point[0]) : "–";
    this.rate.textContent = point ? count(point[1]) : "–";
    return `${this.at.textContent}: ${this.rate.textContent} tokens a second`;
  }
}

function options(): Omit<uPlot.Options, "width" | "height"> {
  return {
    scales: {
      x: { time: true, range: (_u, low, high) => [low, high > low ? high : low + 60] },
      y: { range: (_u, _low, high) => [0, Math.max(1, high || 0) * 1.15] },
    },
    axes: [
      axis(timeAxis()),
      axis({ values: (_u, splits) => splits.map(mark), size: 52, space: 36 }),
    ],
    series: [
      {},
      { stroke: colour("--pace"), fill: colour("--pace-faint"), width: 1.5, spanGaps: true, points: { show: false } },
    ],
  };
}
