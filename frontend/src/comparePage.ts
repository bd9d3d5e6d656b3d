// The page that compares runs: one curve of each run in one chart.

import { createXMapping, findFirstAfter, mapPoints } from "./chartAxes";
import { ChartGroup } from "./chartGroup";
import { parseView } from "./chartExport";
import { requireElement, setText } from "./dom";
import { formatAxisCount, formatAxisValue, formatCount, formatLoss } from "./format";
import { alignCurves, smoothingScale, smoothPoints } from "./movingAverage";
import { PreferenceControls } from "./preferences";
import { thinPoints } from "./store";
import type { Point, Snapshot } from "./types";
import { createCardPlot } from "./views/cardPlot";
import { ChartToolbar } from "./views/chartToolbar";
import { lineStyle } from "./views/lineStyles";
import { formatPosition, X_LABELS } from "./views/lossChart";
import { MachineLegend } from "./views/machineLegend";
import {
  type ChartOptions,
  createXAxis,
  findVisibleRange,
  leaveOutPauses,
  type Plot,
  type PlotData,
  readColour,
} from "./views/plot";

const REFRESH_MS = 20_000; // between two requests for runs in training
const UNKNOWN = "–";

type CurveKind = "train" | "validation" | "rate";
const TITLES: Record<CurveKind, string> = {
  train: "Training loss",
  validation: "Validation loss",
  rate: "Tokens/s",
};

/** A run as the server names it. */
interface ComparedRun {
  id: string;
  name: string;
  stepTokens: number;
  isOver: boolean;
}

/** Draws the compared runs; `card` is the element with `data-compare-runs`. */
export function startComparePage(card: HTMLElement): void {
  const runs = JSON.parse(card.dataset.compareRuns!) as ComparedRun[];
  const view = parseView(location.hash);
  const preferences = new PreferenceControls(card, view.values);
  const group = new ChartGroup();
  group.zoom = view.zoom;
  new ChartToolbar(requireElement(card, "[data-chart-toolbar]"), preferences, group);
  const chart = new CompareChart(card, runs, preferences, group);
  void followRuns(runs, chart);
}

/** Fetch the curves of all runs, and again those of runs that are not over. */
async function followRuns(runs: ComparedRun[], chart: CompareChart): Promise<void> {
  await Promise.all(runs.map((run) => fetchRun(run, chart)));
  const active = runs.filter((run) => !run.isOver);
  if (active.length) {
    window.setInterval(() => {
      if (!document.hidden) for (const run of active) void fetchRun(run, chart);
    }, REFRESH_MS);
  }
}

/** Fetch one run's curves. A run that cannot be fetched has no curve, and is tried again later. */
async function fetchRun(run: ComparedRun, chart: CompareChart): Promise<void> {
  try {
    const response = await fetch(`/live/${run.id}/`, { headers: { Accept: "application/json" } });
    if (!response.ok) throw new Error(`the site answered ${response.status}`);
    chart.setHistory(run.id, (await response.json()) as Snapshot);
  } catch (error) {
    console.info(`the curves of ${run.name} could not be fetched:`, error);
  }
}

/** One curve of each run. */
class CompareChart {
  private readonly plot: Plot;
  private readonly legend: MachineLegend;
  private readonly kindSelect: HTMLSelectElement;
  private readonly histories = new Map<string, Snapshot>();
  private curves: Point[][] = [];
  private shown: ComparedRun[] = [];

  constructor(
    private readonly card: HTMLElement,
    private readonly runs: ComparedRun[],
    private readonly preferences: PreferenceControls,
    private readonly group: ChartGroup,
  ) {
    this.legend = new MachineLegend(requireElement(card, "[data-machine-legend]"));
    this.kindSelect = requireElement(card, "[data-compare-curve]");
    let xAxis = preferences.value.xAxis;
    this.plot = createCardPlot(card, group, preferences, {
      title: () => TITLES[this.kind],
      names: () => [X_LABELS[this.preferences.value.xAxis], ...this.shown.map(({ name }) => name)],
      createOptions: () => this.createOptions(),
      showReadout: (index) => this.showReadout(index),
      onPreferences: () => {
        if (preferences.value.xAxis !== xAxis) group.zoom = null;
        xAxis = preferences.value.xAxis;
        this.draw();
      },
    });
    this.kindSelect.addEventListener("change", () => {
      this.draw();
      this.plot.rebuild();
    });
  }

  setHistory(run: string, history: Snapshot): void {
    this.histories.set(run, history);
    this.draw();
  }

  private get kind(): CurveKind {
    return this.kindSelect.value as CurveKind;
  }

  private draw(): void {
    this.shown = this.runs.filter((run) => this.histories.has(run.id));
    this.curves = this.shown.map((run) => this.createCurve(run, this.histories.get(run.id)!));
    setText(requireElement(this.card, "[data-curve-title]"), TITLES[this.kind]);
    this.legend.show(this.shown.map(({ id, name }) => ({ id, name, points: [], rates: [] })));
    this.plot.show(alignCurves(...this.curves) as PlotData);
    this.group.draw();
  }

  private createCurve(run: ComparedRun, history: Snapshot): Point[] {
    const { xAxis, smoothing } = this.preferences.value;
    const mapping = createXMapping(xAxis, run.stepTokens, history.clock, history.rate);
    const points = thinPoints(history[this.kind]);
    const isMeasured = this.kind === "validation"; // few points, each a mean already
    const scale = isMeasured ? 0 : smoothingScale(points, smoothing);
    const smooth = scale ? smoothPoints(points, scale) : points;
    return mapPoints(smooth, this.kind === "rate" ? mapping.fromTime : mapping.fromTokens);
  }

  private get format(): (value: number | undefined) => string {
    if (this.kind !== "rate") return formatLoss;
    return (value) => (value === undefined ? UNKNOWN : formatCount(value));
  }

  private showReadout(index: number | null): string {
    const { xAxis } = this.preferences.value;
    const xs = this.plot.data[0];
    const at = index === null ? xs.at(-1) : xs[index];
    const x = formatPosition(at, xAxis, Date.now() / 1000);
    const limit = index === null ? Infinity : (at ?? Infinity);
    const values = this.curves.map((points, i) => {
      const end = index === null ? this.endFigure(this.shown[i]!) : null;
      return this.format(end ?? points[findFirstAfter(points, limit) - 1]?.[1]);
    });
    setText(requireElement(this.card, "[data-readout=x-label]"), X_LABELS[xAxis]);
    setText(requireElement(this.card, "[data-readout=x]"), x);
    this.legend.showValues(values);
    return `${x}: ${this.shown.map(({ name }, i) => `${name} ${values[i]}`).join(", ")}`;
  }

  /** The figure of a run in the table, which stands at the end of its curve. */
  private endFigure({ id }: ComparedRun): number | null {
    const { run } = this.histories.get(id)!;
    if (this.kind === "rate") return run.rate;
    return this.kind === "train" ? run.training_loss : run.validation_loss;
  }

  private createOptions(): ChartOptions {
    const isLogarithmic = this.preferences.value.yScale === "log";
    const isRate = this.kind === "rate";
    const { xAxis } = this.preferences.value;
    return {
      series: [
        {},
        ...this.shown.map(({ id, name }, i) => {
          const { colour, dash } = lineStyle(i);
          const pausing = leaveOutPauses(xAxis, () => this.histories.get(id)!.rate);
          const points = { show: false };
          return { label: name, stroke: readColour(colour), dash, width: 2, ...pausing, points };
        }),
      ],
      y: {
        distr: isLogarithmic ? 3 : 1,
        range: (plot) => {
          const range = findVisibleRange(plot, this.preferences.value.ignoreOutliers) ?? [1, 10];
          const margin = Math.max((range[1] - range[0]) * 0.06, 0.02);
          if (isLogarithmic) return [Math.max(1e-3, range[0] / 1.04), range[1] * 1.04];
          return [isRate ? 0 : Math.max(0, range[0] - margin), range[1] + margin];
        },
      },
      yAxis: {
        size: 52,
        values: (_plot, marks) =>
          marks.map((y) => (y === null ? "" : isRate ? formatAxisCount(y) : formatAxisValue(y))),
      },
      xAxis: createXAxis(xAxis),
    };
  }
}
