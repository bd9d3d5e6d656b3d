// The charts of a machine's page: its last day, fetched again every minute.

import { ChartGroup } from "./chartGroup";
import { findFirstAfter } from "./chartAxes";
import { requireElement, setText } from "./dom";
import {
  formatAxisCount,
  formatByteRate,
  formatBytes,
  formatCount,
  formatMoment,
  formatPercent,
} from "./format";
import { alignCurves } from "./movingAverage";
import type { Point } from "./types";
import {
  type ChartOptions,
  createXAxis,
  findPauseGaps,
  findVisibleRange,
  Plot,
  type PlotData,
  readColour,
} from "./views/plot";

const REFRESH_MS = 60_000;
const UNKNOWN = "–";

// Times that are typed in the form are those of the reader's clock.
for (const input of document.querySelectorAll<HTMLInputElement>("[data-local-time] [name=offset]")) {
  input.value = String(-new Date().getTimezoneOffset());
}
for (const time of document.querySelectorAll<HTMLElement>("time[data-pause-end]")) {
  setText(time, formatMoment(Number(time.dataset.pauseEnd), Date.now() / 1000));
}

/** What the server sends of a machine's last day. */
interface MachineHistory {
  since: number;
  until: number;
  series: Record<string, Point[]>;
}

/** What one chart shows. */
interface MachineMetric {
  curves: { name: string; colour: string; dash?: number[] }[];
  format: (value: number) => string;
  formatMark?: (value: number) => string;
  /** The y axis reaches at least this value. */
  top?: number;
}

const formatCelsius = (value: number) => `${Math.round(value)} °C`;

const METRICS: Record<string, MachineMetric> = {
  rate: {
    curves: [{ name: "rate", colour: "--throughput" }],
    format: formatCount,
    formatMark: formatAxisCount,
  },
  link: {
    curves: [
      { name: "sent", colour: "--machine-0" },
      { name: "received", colour: "--machine-1", dash: [6, 3] },
    ],
    format: formatByteRate,
    formatMark: (value) => formatByteRate(value).replace("/s", ""),
    top: 10_000,
  },
  cpu: {
    curves: [
      { name: "cpu", colour: "--machine-1" },
      { name: "worker_cpu", colour: "--train", dash: [6, 3] },
    ],
    format: formatPercent,
    top: 1,
  },
  memory: {
    curves: [
      { name: "memory_used", colour: "--machine-2" },
      { name: "worker_memory", colour: "--train", dash: [6, 3] },
    ],
    format: formatBytes,
  },
  gpu: { curves: [{ name: "gpu", colour: "--machine-1" }], format: formatPercent, top: 1 },
  gpu_memory: {
    curves: [{ name: "gpu_memory_used", colour: "--machine-2" }],
    format: formatBytes,
  },
  temperature: {
    curves: [
      { name: "cpu_celsius", colour: "--machine-0" },
      { name: "gpu_celsius", colour: "--machine-1", dash: [6, 3] },
    ],
    format: formatCelsius,
    top: 100,
  },
};

/** Draw a machine's last day; `section` is the element with `data-machine-history`. */
export function startMachinePage(section: HTMLElement): void {
  const group = new ChartGroup();
  const cards = [...section.querySelectorAll<HTMLElement>("[data-machine-chart]")];
  const charts = cards.map((card) => new MachineChart(card, group));
  const reset = requireElement<HTMLButtonElement>(section, "[data-reset-zoom]");
  reset.addEventListener("click", () => group.zoomTo(null));
  group.onZoom(() => (reset.disabled = group.zoom === null));

  const staleness = requireElement(section, "[data-stale]");
  let loadedAt: number | null = null; // seconds since 1970

  const load = async () => {
    try {
      const response = await fetch(section.dataset.machineHistory!, {
        headers: { Accept: "application/json" },
      });
      if (!response.ok) throw new Error(`the site answered ${response.status}`);
      const history = (await response.json()) as MachineHistory;
      for (const chart of charts) chart.show(history);
      group.draw();
      loadedAt = Date.now() / 1000;
      setText(staleness, "");
    } catch (error) {
      setText(staleness, describeStaleness(loadedAt));
      console.info("the machine's history could not be fetched:", error);
    }
  };
  void load();
  window.setInterval(() => {
    if (!document.hidden) void load();
  }, REFRESH_MS);
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) void load();
  });
}

/** State since when the charts show no new measurements; `loadedAt` is in seconds since 1970. */
function describeStaleness(loadedAt: number | null): string {
  if (loadedAt === null) return "Not loaded: the site does not answer";
  return `Not updated since ${formatMoment(loadedAt, Date.now() / 1000)}`;
}

/** One of the small charts, named by the card's `data-machine-chart`. */
class MachineChart {
  private readonly plot: Plot;
  private readonly metric: MachineMetric;
  private readonly position: HTMLElement;
  private readonly values: HTMLElement[];
  private curves: Point[][] = [];

  constructor(card: HTMLElement, group: ChartGroup) {
    this.metric = METRICS[card.dataset.machineChart!]!;
    this.position = requireElement(card, "[data-readout=x]");
    this.values = [...card.querySelectorAll<HTMLElement>("[data-readout=value]")];
    this.plot = new Plot(
      {
        box: requireElement(card, "[data-plot]"),
        emptyText: requireElement(card, "[data-empty]"),
        createOptions: () => this.createOptions(),
        showReadout: (index) => this.showReadout(index),
      },
      group,
    );
  }

  show({ series }: MachineHistory): void {
    this.curves = this.metric.curves.map(({ name }) => series[name] ?? []);
    this.plot.show(alignCurves(...this.curves) as PlotData);
  }

  private showReadout(index: number | null): string {
    const xs = this.plot.data[0];
    const at = index === null ? xs.at(-1) : xs[index];
    const limit = at ?? Infinity;
    const texts = this.curves.map((points) => {
      const point = points[findFirstAfter(points, limit) - 1];
      return point ? this.metric.format(point[1]) : UNKNOWN;
    });
    const time = at === undefined ? UNKNOWN : formatMoment(at, Date.now() / 1000);
    setText(this.position, time);
    this.values.forEach((element, i) => setText(element, texts[i] ?? UNKNOWN));
    return `${time}: ${texts.join(", ")}`;
  }

  private createOptions(): ChartOptions {
    const { curves, format, formatMark = format, top = 0 } = this.metric;
    return {
      series: [
        {},
        ...curves.map(({ colour, dash = [] }) => ({
          stroke: readColour(colour),
          dash,
          width: 1.5,
          spanGaps: false,
          gaps: findPauseGaps,
          points: { show: (plot: { data: ArrayLike<unknown>[] }) => plot.data[0]!.length === 1 },
        })),
      ],
      y: {
        range: (plot) => {
          const high = findVisibleRange(plot, false)?.[1] ?? 0;
          return [0, Math.max(top, high * 1.1) || 1];
        },
      },
      yAxis: { size: 58, space: 32, values: (_plot, marks) => marks.map(formatMark) },
      xAxis: createXAxis("time"),
    };
  }
}
