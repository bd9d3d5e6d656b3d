// The chart of losses. The training loss of all machines together is drawn twice: every point
// faintly, and a smoothed curve. The validation loss is that of the shared weights on held-out
// text. Readers may add the curves of single machines.

import type uPlot from "uplot";
import { createXMapping, findFirstAfter, mapPoints, type XAxis } from "../chartAxes";
import type { ChartGroup } from "../chartGroup";
import { requireElement, setText } from "../dom";
import {
  formatAxisValue,
  formatCount,
  formatDuration,
  formatInteger,
  formatLoss,
  formatMoment,
  formatPercent,
} from "../format";
import { createLossScale, type LossScale } from "../lossUnits";
import { alignCurves, smoothingScale, smoothPoints } from "../movingAverage";
import type { PreferenceControls } from "../preferences";
import type { Store } from "../store";
import type { Point, Run, WorkerCurve } from "../types";
import { createCardPlot } from "./cardPlot";
import { lineStyle } from "./lineStyles";
import { MachineLegend } from "./machineLegend";
import {
  type ChartOptions,
  createXAxis,
  findVisibleRange,
  leaveOutPauses,
  type Plot,
  type PlotData,
  readColour,
} from "./plot";

export const X_LABELS: Record<XAxis, string> = {
  tokens: "Tokens",
  steps: "Steps",
  time: "Time",
  active: "Training time",
};
const SUMMARY_INTERVAL_MS = 20_000; // between two summaries for screen readers
const MAX_MARKED_POINTS = 40; // a curve with more points shows a mark only at its end
const Y_STEPS = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5]; // distances between marks of the y axis

/** Format a position on an x axis. */
export function formatPosition(x: number | undefined, axis: XAxis, now: number): string {
  if (x === undefined) return "–";
  switch (axis) {
    case "tokens":
      return formatCount(x);
    case "steps":
      return formatInteger(x);
    case "time":
      return formatMoment(x, now);
    case "active":
      return formatDuration(x);
  }
}

/** Draws the losses with the reader's preferences. */
export class LossChart {
  private readonly plot: Plot;
  private readonly readouts: Map<string, HTMLElement>;
  private readonly summary: HTMLElement;
  private readonly title: HTMLElement;
  private readonly legend: MachineLegend;
  private readonly stepTokens: number;
  private readonly tokensPerByte: number;
  private scale: LossScale;
  private store: Store | null = null;
  private trainCurve: Point[] = [];
  private validationCurve: Point[] = [];
  private machineCurves: WorkerCurve[] = [];
  private summarizedAt = -Infinity; // milliseconds since the page was opened

  constructor(
    card: HTMLElement,
    private readonly preferences: PreferenceControls,
    group: ChartGroup,
  ) {
    const readouts = [...card.querySelectorAll<HTMLElement>("[data-readout]")];
    this.readouts = new Map(readouts.map((element) => [element.dataset.readout!, element]));
    this.stepTokens = Number(card.dataset.stepTokens);
    this.tokensPerByte = Number(card.dataset.tokensPerByte || NaN);
    this.scale = createLossScale(preferences.value.lossUnit, this.tokensPerByte);
    this.summary = requireElement(card, "[data-summary]");
    this.title = requireElement(card, "[data-loss-title]");
    this.legend = new MachineLegend(requireElement(card, "[data-machine-legend]"));
    this.plot = createCardPlot(card, group, preferences, {
      title: () => this.scale.label,
      names: () => this.listNames(),
      createOptions: () => this.createOptions(),
      showReadout: (index) => this.showReadout(index),
    });
  }

  draw(store: Store): void {
    this.store = store;
    this.plot.offer(() => this.createData(store));
    if (store.run) this.updateSummary(store, store.run);
  }

  private createData(store: Store): PlotData {
    const { xAxis, smoothing, trainCurve, validationCurve, machineCurves, lossUnit } =
      this.preferences.value;
    const { train, validation, clock, rate } = store.curves;
    const { fromTokens } = createXMapping(xAxis, this.stepTokens, clock, rate);
    this.scale = createLossScale(lossUnit, this.tokensPerByte);
    const { convert } = this.scale;

    // Curves. The mean is that of losses: perplexities would weigh high ones more.
    const scale = smoothingScale(train, smoothing);
    const place = (points: Point[]) =>
      mapPoints(points, fromTokens).map(([x, loss]): Point => [x, convert(loss)]);
    const smooth = (points: Point[]) => place(scale ? smoothPoints(points, scale) : points);
    this.trainCurve = trainCurve ? smooth(train) : [];
    this.validationCurve = validationCurve ? place(validation) : [];
    this.machineCurves = [];
    if (machineCurves) {
      const shown = store.workerCurves.filter((curve) => curve.points.length);
      this.machineCurves = shown.map((curve) => ({ ...curve, points: smooth(curve.points) }));
    }
    const unsmoothed = trainCurve && scale ? place(train) : [];

    // Page
    setText(this.title, this.scale.label);
    this.legend.show(this.machineCurves);
    const machinePoints = this.machineCurves.map((curve) => curve.points);
    return alignCurves(unsmoothed, this.trainCurve, this.validationCurve, ...machinePoints);
  }

  private listNames(): string[] {
    const x = X_LABELS[this.preferences.value.xAxis];
    const machines = this.machineCurves.map((curve) => `${curve.name}, smoothed`);
    return [x, "Training", "Training, smoothed", "Validation", ...machines];
  }

  /** Describe the curves for screen readers, which would announce every change. */
  private updateSummary(store: Store, run: Run): void {
    if (performance.now() - this.summarizedAt < SUMMARY_INTERVAL_MS) return;
    this.summarizedAt = performance.now();
    const { validation } = store.curves;
    const first = validation[0];
    const last = validation.at(-1);
    const start = first && last !== first ? `, from ${formatLoss(first[1])} at the start` : "";
    const progress = `${formatPercent(run.tokens / run.budget)} of the budget`;
    this.summary.textContent = [
      `After ${formatCount(run.tokens)} tokens (${progress}):`,
      `training loss ${formatLoss(run.training_loss)},`,
      `validation loss ${formatLoss(run.validation_loss)}${start}.`,
      "The arrow keys move along the curves, plus and minus zoom, 0 shows everything.",
    ].join(" ");
  }

  /** Show the values at a point of the x axis (null: the last one), and return them as text. */
  private showReadout(index: number | null): string {
    const xs = this.plot.data[0];
    const { xAxis } = this.preferences.value;
    const label = X_LABELS[xAxis];
    const x = formatPosition(
      index === null ? xs.at(-1) : xs[index],
      xAxis,
      this.store?.now ?? Date.now() / 1000,
    );
    const position = index === null ? Infinity : (xs[index] ?? Infinity);
    const format = (points: Point[]) => this.scale.format(findLastUpTo(points, position)?.[1]);
    // At the end stand the figures of the page's head.
    const run = index === null ? this.store?.run : undefined;
    const figure = (loss: number | null | undefined, points: Point[]) =>
      loss == null || !points.length
        ? format(points)
        : this.scale.format(this.scale.convert(loss));
    const train = figure(run?.training_loss, this.trainCurve);
    const validation = figure(run?.validation_loss, this.validationCurve);
    const machineLosses = this.machineCurves.map((curve) => format(curve.points));

    setText(this.readouts.get("x-label"), label);
    setText(this.readouts.get("x"), x);
    setText(this.readouts.get("train"), train);
    setText(this.readouts.get("validation"), validation);
    this.legend.showValues(machineLosses);

    const machines = this.machineCurves.map((curve, i) => `${curve.name} ${machineLosses[i]}`);
    const losses = [`training ${train}`, `validation ${validation}`, ...machines];
    return `${label} ${x}: ${losses.join(", ")}`;
  }

  private createOptions(): ChartOptions {
    return {
      series: this.createSeries(),
      y: this.createScale(),
      xAxis: createXAxis(this.preferences.value.xAxis),
      yAxis: this.createYAxis(),
    };
  }

  private get isLogarithmic(): boolean {
    return this.preferences.value.yScale === "log";
  }

  private createScale(): uPlot.Scale {
    return {
      distr: this.isLogarithmic ? 3 : 1,
      log: 2,
      range: (plot) => {
        const range = findVisibleRange(plot, this.preferences.value.ignoreOutliers);
        return addMargin(range, this.isLogarithmic);
      },
    };
  }

  private createYAxis(): uPlot.Axis {
    const axis: uPlot.Axis = {
      values: (_plot, marks) => marks.map((y) => (y === null ? "" : formatAxisValue(y))),
      size: 48,
    };
    if (!this.isLogarithmic) return axis;
    // A range of losses seldom spans a power of ten, where uPlot would set the marks.
    return {
      ...axis,
      splits: (_plot, _axis, low, high) => spreadMarks(low, high),
      filter: (_plot, marks) => marks,
    };
  }

  private createSeries(): uPlot.Series[] {
    const trainColour = readColour("--train");
    const validationColour = readColour("--validation");
    const pausing = leaveOutPauses(this.preferences.value.xAxis, () => this.store!.curves.rate);
    const withoutMarks = { ...pausing, points: { show: false } };
    const machines = this.machineCurves.map((curve, i) => {
      const { colour, dash } = lineStyle(i);
      return { label: curve.name, stroke: readColour(colour), dash, width: 1.25, ...withoutMarks };
    });
    return [
      {},
      { label: "each step", stroke: readColour("--train-faint"), width: 1, ...withoutMarks },
      { label: "training", stroke: trainColour, width: 2, ...withoutMarks },
      {
        label: "validation",
        stroke: validationColour,
        width: 2,
        ...pausing,
        points: {
          show: true,
          size: 6,
          fill: readColour("--surface"),
          stroke: validationColour,
          width: 2,
          filter: selectMarkedPoints,
        },
      },
      ...machines,
    ];
  }
}

/** Return the last point whose x is at most `x`. */
function findLastUpTo(points: Point[], x: number): Point | undefined {
  return points[findFirstAfter(points, x) - 1];
}

/** Return the range of the y axis: that of the losses with a margin. */
function addMargin(range: [number, number] | null, isLogarithmic: boolean): [number, number] {
  if (!range) return [1, 10];
  const [low, high] = range;
  if (isLogarithmic) return [Math.max(1e-3, low / 1.04), Math.max(high, low + 0.01) * 1.04];
  const margin = Math.max((high - low) * 0.06, 0.02);
  return [Math.max(0, low - margin), high + margin];
}

/** Return about four to eight round, positive values in [low, high]. */
function spreadMarks(low: number, high: number): number[] {
  const step = Y_STEPS.find((size) => (high - low) / size <= 7) ?? (high - low) / 6;
  const marks: number[] = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) {
    marks.push(Number((n * step).toFixed(4)));
  }
  return marks.filter((y) => y > 0);
}

/** Select the points that get a mark: all of a short curve, the last of a long one. */
const selectMarkedPoints: uPlot.Series.Points.Filter = (plot, seriesIndex) => {
  const indices: number[] = [];
  plot.data[seriesIndex]!.forEach((y, i) => {
    if (y != null) indices.push(i);
  });
  return indices.length <= MAX_MARKED_POINTS ? indices : [indices.at(-1)!];
};
