// The small charts: one metric each, on the same x axis as the losses.

import type uPlot from "uplot";
import { createXMapping, findFirstAfter, mapPoints } from "../chartAxes";
import type { ChartGroup } from "../chartGroup";
import { requireElement, setText } from "../dom";
import {
  formatAxisCount,
  formatAxisValue,
  formatByteRate,
  formatCount,
  formatInteger,
  formatValue,
} from "../format";
import { alignCurves, smoothingScale, smoothPoints } from "../movingAverage";
import type { PreferenceControls } from "../preferences";
import { type StackedRate, stackRates } from "../stackedRates";
import type { CurveName, Store } from "../store";
import type { Point } from "../types";
import { createCardPlot } from "./cardPlot";
import { lineStyle } from "./lineStyles";
import { formatPosition, X_LABELS } from "./lossChart";
import { MachineLegend } from "./machineLegend";
import {
  type ChartOptions,
  createXAxis,
  findPauseGaps,
  findVisibleRange,
  leaveOutPauses,
  type Plot,
  type PlotData,
  readColour,
} from "./plot";

/** One curve of a metric. */
interface MetricCurve {
  name: CurveName;
  label: string;
  /** The custom property with its colour. */
  colour: string;
  dash?: number[];
}

/** What a small chart shows. */
interface Metric {
  curves: MetricCurve[];
  over: "tokens" | "time";
  format: (value: number | undefined) => string;
  formatMark: (value: number) => string;
  /** Whether the curve is smoothed like the training loss, with the original behind it. */
  isSmoothed?: boolean;
  /** The y axis reaches at least this value. */
  minTop?: number;
}

const UNKNOWN = "–";
const FILL_ALPHA = "38"; // of a stacked area's colour, in hexadecimal
const MARK_SIZE = 52; // pixels for the marks of the y axis

const METRICS: Record<string, Metric> = {
  rate: {
    curves: [{ name: "rate", label: "All machines", colour: "--throughput" }],
    over: "time",
    format: formatMaybe(formatCount),
    formatMark: formatAxisCount,
  },
  learning_rate: {
    curves: [{ name: "learning_rate", label: "Learning rate", colour: "--train" }],
    over: "tokens",
    format: formatValue,
    formatMark: formatAxisValue,
  },
  gradient_norm: {
    curves: [{ name: "gradient_norm", label: "Gradient norm", colour: "--train" }],
    over: "tokens",
    format: formatValue,
    formatMark: formatAxisValue,
    isSmoothed: true,
  },
  machines: {
    curves: [{ name: "machines", label: "Machines", colour: "--validation" }],
    over: "time",
    format: formatMaybe(formatInteger),
    formatMark: formatAxisValue,
  },
  traffic: {
    curves: [
      { name: "sent", label: "Sent", colour: "--machine-0" },
      { name: "received", label: "Received", colour: "--machine-1", dash: [6, 3] },
    ],
    over: "time",
    format: formatMaybe(formatByteRate),
    formatMark: (value) => formatByteRate(value).replace("/s", ""),
    minTop: 10_000,
  },
  staleness: {
    curves: [{ name: "staleness", label: "Updates behind", colour: "--oak" }],
    over: "time",
    format: formatValue,
    formatMark: formatAxisValue,
  },
};

function formatMaybe(format: (value: number) => string): (value: number | undefined) => string {
  return (value) => (value === undefined ? UNKNOWN : format(value));
}

/** Draws one metric, named by the card's `data-metric-chart`. */
export class MetricChart {
  private readonly plot: Plot;
  private readonly metric: Metric;
  private readonly position: HTMLElement;
  private readonly values: HTMLElement[];
  private readonly legend: MachineLegend | null;
  private readonly stepTokens: number;
  private store: Store | null = null;
  private curves: Point[][] = [];
  private stack: StackedRate[] = [];

  constructor(
    private readonly card: HTMLElement,
    private readonly preferences: PreferenceControls,
    group: ChartGroup,
  ) {
    this.metric = METRICS[card.dataset.metricChart!]!;
    this.stepTokens = Number(card.dataset.stepTokens);
    this.position = requireElement(card, "[data-readout=x]");
    this.values = [...card.querySelectorAll<HTMLElement>("[data-readout=value]")];
    const legend = card.querySelector<HTMLElement>("[data-machine-legend]");
    this.legend = legend && new MachineLegend(legend);
    this.plot = createCardPlot(card, group, preferences, {
      title: () => requireElement(card, "h2, h3").textContent ?? "",
      names: () => this.listNames(),
      createOptions: () => this.createOptions(),
      showReadout: (index) => this.showReadout(index),
    });
  }

  draw(store: Store): void {
    this.store = store;
    this.plot.offer(() => this.createData(store));
  }

  private createData(store: Store): PlotData {
    const { xAxis, smoothing } = this.preferences.value;
    const mapping = createXMapping(xAxis, this.stepTokens, store.curves.clock, store.curves.rate);
    const mapX = this.metric.over === "time" ? mapping.fromTime : mapping.fromTokens;
    const measured = this.metric.curves.map(({ name }) => store.curves[name]);
    this.stack = this.isStacked ? stackRates(measured[0]!, store.workerCurves) : [];
    if (this.stack.length) {
      this.curves = this.stack.map(({ tops }) => mapPoints(tops, mapX));
    } else {
      this.curves = measured.map((points) => mapPoints(points, mapX));
      if (this.metric.isSmoothed) {
        const smoothed = smoothPoints(measured[0]!, smoothingScale(measured[0]!, smoothing));
        this.curves.push(mapPoints(smoothed, mapX));
      }
    }
    this.legend?.show(
      this.stack.map(({ id, name }) => ({ id, name, points: [], rates: [] })),
    );
    return alignCurves(...this.curves) as PlotData;
  }

  private get isStacked(): boolean {
    return this.card.dataset.metricChart === "rate" && this.preferences.value.machineRates;
  }

  private listNames(): string[] {
    const x = X_LABELS[this.preferences.value.xAxis];
    if (this.stack.length) return [x, ...this.stack.map(({ name }) => `up to ${name}`)];
    const labels = this.metric.curves.map(({ label }) => label);
    return [x, ...labels, ...(this.metric.isSmoothed ? [`${labels[0]}, smoothed`] : [])];
  }

  private showReadout(index: number | null): string {
    const xs = this.plot.data[0];
    const { xAxis } = this.preferences.value;
    const at = index === null ? xs.at(-1) : xs[index];
    const x = formatPosition(at, xAxis, this.store?.now ?? Date.now() / 1000);
    const limit = index === null ? Infinity : (at ?? Infinity);
    const last = (points: Point[] | undefined) =>
      points && points[findFirstAfter(points, limit) - 1]?.[1];
    setText(this.position, x);
    if (this.stack.length) return this.showStack(x, limit);
    const shown = this.metric.isSmoothed ? [this.curves[1]] : this.curves;
    const texts = shown.map((points) => this.metric.format(last(points)));
    this.values.forEach((element, i) => setText(element, texts[i] ?? UNKNOWN));
    const named = texts.map((text, i) => `${this.metric.curves[i]?.label ?? ""} ${text}`);
    return `${x}: ${named.join(", ")}`;
  }

  /** Show the total, and what each machine adds to it. */
  private showStack(x: string, limit: number): string {
    const tops = this.curves.map((points) => points[findFirstAfter(points, limit) - 1]?.[1] ?? 0);
    const shares = tops.map((top, i) => top - (tops[i + 1] ?? 0));
    setText(this.values[0], this.metric.format(tops[0]));
    this.legend?.showValues(shares.map((share) => this.metric.format(share)));
    const named = this.stack.map(({ name }, i) => `${name} ${this.metric.format(shares[i])}`);
    return `${x}: ${this.metric.format(tops[0])} in all; ${named.join(", ")}`;
  }

  private createOptions(): ChartOptions {
    return {
      series: [{}, ...(this.stack.length ? this.createStack() : this.createLines())],
      y: { range: (plot) => this.findYRange(plot) },
      xAxis: createXAxis(this.preferences.value.xAxis),
      yAxis: {
        values: (_plot, marks) => marks.map(this.metric.formatMark),
        size: MARK_SIZE,
        space: 32,
      },
    };
  }

  private findYRange(plot: uPlot): [number, number] {
    const range = findVisibleRange(plot, this.preferences.value.ignoreOutliers);
    const high = Math.max(range?.[1] ?? 0, this.metric.minTop ?? 0);
    return [0, high > 0 ? high * 1.12 : 1];
  }

  private createLines(): uPlot.Series[] {
    const { curves, isSmoothed } = this.metric;
    const lines: uPlot.Series[] = curves.map(({ label, colour, dash = [] }) => ({
      label,
      stroke: readColour(isSmoothed ? "--train-faint" : colour),
      dash,
      width: isSmoothed ? 1 : 1.5,
      ...this.pausing,
      points: { show: hasOnePoint, size: 6 },
    }));
    if (isSmoothed) {
      const stroke = readColour(curves[0]!.colour);
      lines.push({ ...lines[0]!, label: "smoothed", stroke, width: 2 });
    }
    return lines;
  }

  private createStack(): uPlot.Series[] {
    return this.stack.map(({ name }, i) => {
      const { colour, dash } = lineStyle(i);
      const stroke = readColour(colour);
      const fill = stroke + FILL_ALPHA;
      const points = { show: hasOnePoint, size: 6 };
      return { label: name, stroke, dash, fill, width: 1, ...this.pausing, points };
    });
  }

  /** How curves pass over positions without a point: only time goes on during an outage. */
  private get pausing(): uPlot.Series {
    const { xAxis } = this.preferences.value;
    if (this.metric.over === "tokens") return leaveOutPauses(xAxis, () => this.store!.curves.rate);
    return xAxis === "time" ? { spanGaps: false, gaps: findPauseGaps } : { spanGaps: true };
  }
}

function hasOnePoint(plot: uPlot): boolean {
  return plot.data[0].length === 1;
}
