// Training and validation loss over the ledger's tokens. Training is drawn twice: every point faintly, and the line one
// reads off them; validation is what the shared weights score on held-out text.

import uPlot from "uplot";
import { count, loss, mark, percent } from "../format";
import { align, smooth } from "../smooth";
import type { Store } from "../store";
import type { Pair } from "../types";
import { axis, colour, Plot } from "./plot";

/** How far the smoothed line looks back, as a share of the range of tokens: three points' worth, within reason. */
const readOff = (points: number) => Math.min(1 / 30, Math.max(1 / 80, 3 / points));

export class LossChart {
  private readonly plot: Plot;
  private readonly readout: Map<string, HTMLElement>;
  private readonly described: HTMLElement;
  private logarithmic = false;
  private train: Pair[] = [];
  private validation: Pair[] = [];
  private told = 0;

  constructor(place: HTMLElement) {
    this.readout = new Map(
      [...place.querySelectorAll<HTMLElement>("[data-read]")].map((element) => [element.dataset.read!, element]),
    );
    this.described = place.querySelector("[data-described]")!;
    const empty = place.querySelector<HTMLElement>("[data-empty]")!;
    this.plot = new Plot(place.querySelector("[data-plot]")!, empty, () => this.options(), (index) => this.read(index));
    for (const button of place.querySelectorAll<HTMLButtonElement>("[data-scale]"))
      button.addEventListener("click", () => {
        this.logarithmic = button.dataset.scale === "log";
        for (const other of place.querySelectorAll("[data-scale]"))
          other.setAttribute("aria-pressed", String(other === button));
        this.plot.rebuild();
      });
  }

  draw(store: Store): void {
    const raw = store.series.train;
    const range = (raw.at(-1)?.[0] ?? 0) - (raw[0]?.[0] ?? 0);
    this.train = smooth(raw, range * readOff(raw.length));
    this.validation = store.series.validation;
    this.plot.show(align(raw, this.train, this.validation));
    this.describe(store);
  }

  /** In words for who does not see it; said anew at most every 20 s. */
  private describe(store: Store): void {
    if (performance.now() - this.told < 20_000 && this.told) return;
    this.told = performance.now();
    const [train, validation] = [this.train.at(-1), this.validation.at(-1)];
    const [first, run] = [this.validation[0], store.run!];
    const from = first && validation !== first ? `, from ${loss(first[1])} at the start` : "";
    this.described.textContent =
      `After ${count(run.tokens)} tokens (${percent(run.tokens / run.budget)} of the budget): ` +
      `training loss ${loss(train?.[1])}, validation loss ${loss(validation?.[1])}${from}.`;
  }

  private read(index: number | null): void {
    const xs = this.plot.data[0];
    const at = index === null ? Infinity : (xs[index] ?? Infinity);
    const [train, validation] = [before(this.train, at), before(this.validation, at)];
    const tokens = index === null ? xs.at(-1) : at;
    this.put("tokens", tokens === undefined ? "–" : count(tokens));
    this.put("train", loss(train?.[1]));
    this.put("validation", loss(validation?.[1]));
  }

  private put(name: string, text: string): void {
    const element = this.readout.get(name);
    if (element && element.textContent !== text) element.textContent = text;
  }

  private options(): Omit<uPlot.Options, "width" | "height"> {
    const [train, validation] = [colour("--train"), colour("--validation")];
    return {
      scales: {
        x: { time: false, range: (_u, low, high) => [low, high > low ? high : low + 1] },
        y: { distr: this.logarithmic ? 3 : 1, log: 2, range: (_u, low, high) => around(low, high, this.logarithmic) },
      },
      axes: [
        axis({ values: (_u, splits) => splits.map(mark), space: 90, size: 30 }),
        axis({
          values: (_u, splits) => splits.map((y) => (y === null ? "" : Number(y.toFixed(2)).toString())),
          size: 44,
          // A range of losses seldom spans a power of ten: split the log scale as evenly as the eye wants it.
          ...(this.logarithmic && { splits: (_u, _i, low, high) => even(low, high), filter: (_u, splits) => splits }),
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
      ],
    };
  }
}

/** The newest point at or before these tokens. */
function before(points: Pair[], tokens: number): Pair | undefined {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle]![0] <= tokens) low = middle + 1;
    else high = middle;
  }
  return points[low - 1];
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
