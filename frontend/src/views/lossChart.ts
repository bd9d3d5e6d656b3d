// Training and validation loss over the ledger's tokens, over steps, or over time. Training is drawn twice: every point
// faintly, and the line one reads off them; validation is what the shared weights score on held-out text. Machines have
// lines of their own, where somebody wants to see them.

import uPlot from "uplot";
import { across, firstAfter, laid } from "../chartAxes";
import type { PreferenceControls } from "../preferences";
import { count, loss, mark, moment, percent, whole } from "../format";
import { align, smooth } from "../movingAverage";
import type { Store } from "../store";
import type { WorkerCurve, Point } from "../types";
import { MachineLegend, lineStyle } from "./lineStyles";
import { axis, colour, Plot, timeAxis } from "./plot";

const WIDER = { none: 0, some: 1, much: 5 }; // times what is read off anyway
const ACROSS = { tokens: "Tokens", steps: "Steps", time: "Time" };

/** How far the smoothed line looks back, as a share of the range of tokens: three points' worth, within reason. */
const readOff = (points: number) => Math.min(1 / 30, Math.max(1 / 80, 3 / points));

export class LossChart {
  private readonly plot: Plot;
  private readonly readout: Map<string, HTMLElement>;
  private readonly described: HTMLElement;
  private readonly legend: MachineLegend;
  private readonly stepTokens: number;
  private store: Store | null = null;
  private train: Point[] = [];
  private validation: Point[] = [];
  private curves: WorkerCurve[] = [];
  private told = 0;

  constructor(place: HTMLElement, private readonly chosen: PreferenceControls) {
    this.readout = new Map(
      [...place.querySelectorAll<HTMLElement>("[data-read]")].map((element) => [element.dataset.read!, element]),
    );
    this.stepTokens = Number(place.dataset.stepTokens);
    this.described = place.querySelector("[data-described]")!;
    this.legend = new MachineLegend(place.querySelector("[data-machine-lines]")!);
    const empty = place.querySelector<HTMLElement>("[data-empty]")!;
    this.plot = new Plot(place.querySelector("[data-plot]")!, empty, () => this.options(), (index) => this.read(index));
    chosen.onChange(() => {
      if (!this.store) return;
      this.draw(this.store);
      this.plot.rebuild();
    });
  }

  draw(store: Store): void {
    this.store = store;
    const { value: choice } = this.chosen;
    const { train: raw, clock } = store.series;
    const range = (raw.at(-1)?.[0] ?? 0) - (raw[0]?.[0] ?? 0);
    const place = across(choice.across, this.stepTokens, clock);
    const back = range * readOff(raw.length) * WIDER[choice.smoothing];
    const line = (points: Point[]) => laid(back ? smooth(points, back) : points, place);
    this.train = choice.train ? line(raw) : [];
    this.validation = choice.validation ? laid(store.series.validation, place) : [];
    this.curves = choice.machines ? store.curves.map((each) => ({ ...each, points: line(each.points) })) : [];
    this.legend.show(this.curves);
    const faint = choice.train && back ? laid(raw, place) : [];
    this.plot.show(align(faint, this.train, this.validation, ...this.curves.map((each) => each.points)));
    this.describe(store);
  }

  /** In words for who does not see it; said anew at most every 20 s. */
  private describe(store: Store): void {
    if (performance.now() - this.told < 20_000 && this.told) return;
    this.told = performance.now();
    const [train, validation] = [store.series.train.at(-1), store.series.validation.at(-1)];
    const [first, run] = [store.series.validation[0], store.run!];
    const from = first && validation !== first ? `, from ${loss(first[1])} at the start` : "";
    this.described.textContent =
      `After ${count(run.tokens)} tokens (${percent(run.tokens / run.budget)} of the budget): ` +
      `training loss ${loss(train?.[1])}, validation loss ${loss(validation?.[1])}${from}. ` +
      "The arrow keys go along it.";
  }

  private read(index: number | null): string {
    const xs = this.plot.data[0];
    const at = index === null ? Infinity : (xs[index] ?? Infinity);
    const [train, validation] = [before(this.train, at), before(this.validation, at)];
    const x = this.said(index === null ? xs.at(-1) : at);
    this.put("across", ACROSS[this.chosen.value.across]);
    this.put("x", x);
    this.put("train", loss(train?.[1]));
    this.put("validation", loss(validation?.[1]));
    const machines = this.curves.map((line) => [line.name, loss(before(line.points, at)?.[1])] as const);
    this.legend.read(machines.map(([, value]) => value));
    const said = [["training", loss(train?.[1])], ["validation", loss(validation?.[1])], ...machines];
    return `${ACROSS[this.chosen.value.across]} ${x}: ${said.map((pair) => pair.join(" ")).join(", ")}`;
  }

  private said(x: number | undefined): string {
    if (x === undefined) return "–";
    if (this.chosen.value.across === "time") return moment(x, this.store?.now ?? x);
    return this.chosen.value.across === "steps" ? whole(x) : count(x);
  }

  private put(name: string, text: string): void {
    const element = this.readout.get(name);
    if (element && element.textContent !== text) element.textContent = text;
  }

  private options(): Omit<uPlot.Options, "width" | "height"> {
    const [train, validation] = [colour("--train"), colour("--validation")];
    const logarithmic = this.chosen.value.scale === "log";
    const time = this.chosen.value.across === "time";
    return {
      scales: {
        x: { time: false, range: (_u, low, high) => [low, high > low ? high : low + 1] },
        y: { distr: logarithmic ? 3 : 1, log: 2, range: (_u, low, high) => around(low, high, logarithmic) },
      },
      axes: [
        axis(time ? timeAxis() : { values: (_u, splits) => splits.map(mark), space: 90, size: 30 }),
        axis({
          values: (_u, splits) => splits.map((y) => (y === null ? "" : Number(y.toFixed(2)).toString())),
          size: 44,
          // A range of losses seldom spans a power of ten: split the log scale as evenly as the eye wants it.
          ...(logarithmic && { splits: (_u, _i, low, high) => even(low, high), filter: (_u, splits) => splits }),
        }),
      ],
      series: [
        {},
        { label: "each step", stroke: colour("--train-faint"), width: 1, spanGaps: true, points: { show: false } },
        { label: "training", stroke: train, width: 2, spanGaps: true, points: { show: false } },
        {
          label: "validation",
          stroke: validation,
          width: 2,
          spanGaps: true,
          points: { show: true, size: 6, fill: colour("--surface"), stroke: validation, width: 2, filter: sparse },
        },
        ...this.curves.map((line, i) => {
          const { ink, dash } = lineStyle(i);
          return { label: line.name, stroke: colour(ink), dash, width: 1.25, spanGaps: true, points: { show: false } };
        }),
      ],
    };
  }
}

/** The newest point at or before this place. */
function before(points: Point[], x: number): Point | undefined {
  return points[firstAfter(points, x) - 1];
}

function around(low: number | null, high: number | null, logarithmic: boolean): [number, number] {
  if (low === null || high === null || !Number.isFinite(low) || !Number.isFinite(high)) return [1, 10];
  if (logarithmic) return [Math.max(1e-3, low / 1.04), Math.max(high, low + 0.01) * 1.04];
  const margin = Math.max((high - low) * 0.06, 0.02);
  return [Math.max(0, low - margin), high + margin];
}

/** Round values in [low, high], four to eight of them. */
function even(low: number, high: number): number[] {
  const step = [0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5].find((size) => (high - low) / size <= 7) ?? 10;
  const found: number[] = [];
  for (let n = Math.ceil(low / step); n * step <= high; n++) found.push(Number((n * step).toFixed(4)));
  return found.filter((y) => y > 0);
}

/** Marks on a line of a few points; a line of many speaks for itself. */
const sparse: uPlot.Series.Points.Filter = (u, seriesIndex) => {
  const indices: number[] = [];
  u.data[seriesIndex]!.forEach((y, i) => y != null && indices.push(i));
  return indices.length <= 40 ? indices : [indices.at(-1)!];
};
