// The chart of tokens per second over time, of all machines together.

import type uPlot from "uplot";
import { requireElement, setText } from "../dom";
import { formatAxisCount, formatClock, formatCount } from "../format";
import type { Store } from "../store";
import type { Point } from "../types";
import { axisOptions, Plot, readColour, timeAxis } from "./plot";

const SINGLE_POINT_RANGE = 60; // seconds that the x axis spans while there is a single point

/** Draws the run's throughput. */
export class ThroughputChart {
  private readonly plot: Plot;
  private readonly timeReadout: HTMLElement;
  private readonly rateReadout: HTMLElement;
  private points: Point[] = [];

  constructor(card: HTMLElement) {
    this.timeReadout = requireElement(card, "[data-readout=time]");
    this.rateReadout = requireElement(card, "[data-readout=rate]");
    this.plot = new Plot({
      box: requireElement(card, "[data-plot]"),
      emptyText: requireElement(card, "[data-empty]"),
      createOptions,
      showReadout: (index) => this.showReadout(index),
    });
  }

  draw(store: Store): void {
    this.points = store.curves.rate;
    this.plot.show([this.points.map(([time]) => time), this.points.map(([, rate]) => rate)]);
  }

  private showReadout(index: number | null): string {
    const point = index === null ? this.points.at(-1) : this.points[index];
    const time = point ? formatClock(point[0]) : "–";
    const rate = point ? formatCount(point[1]) : "–";
    setText(this.timeReadout, time);
    setText(this.rateReadout, rate);
    return `${time}: ${rate} tokens a second`;
  }
}

function createOptions(): Omit<uPlot.Options, "width" | "height"> {
  return {
    scales: {
      x: {
        time: true,
        // For a single point uPlot proposes a range of years.
        range: (plot, low, high) => [low, isSinglePoint(plot) ? low + SINGLE_POINT_RANGE : high],
      },
      y: { range: (_plot, _low, high) => [0, Math.max(1, high || 0) * 1.15] },
    },
    axes: [
      axisOptions(timeAxis()),
      axisOptions({ values: (_plot, marks) => marks.map(formatAxisCount), size: 52, space: 36 }),
    ],
    series: [
      {},
      {
        stroke: readColour("--throughput"),
        fill: readColour("--throughput-faint"),
        width: 1.5,
        spanGaps: true,
        points: { show: isSinglePoint, size: 6 },
      },
    ],
  };
}

/** Return whether there is a point but no line yet. */
function isSinglePoint(plot: uPlot): boolean {
  return plot.data[0].length === 1;
}
