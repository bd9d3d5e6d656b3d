// What the charts share: a uPlot that fills its box, has the page's colours, can be zoomed, and can
// be read with a mouse and with the keyboard.

import "uplot/dist/uPlot.min.css";
import uPlot from "uplot";
import { findGapsInPauses, findPauses, findTrainingPauses, type XAxis } from "../chartAxes";
import type { ChartGroup, GroupedChart, Section } from "../chartGroup";
import { watchVisibility } from "../dom";
import { findChartInterval, findPixelTime } from "../drawPace";
import { formatAxisCount, formatAxisDuration, formatClock, formatDay } from "../format";
import { findRange } from "../movingAverage";
import { onThemeChange } from "../theme";
import type { Point } from "../types";

/** The x axis, and the values of each curve on it; null where a curve has no point. */
export type PlotData = [number[], ...(number | null)[][]];

/** uPlot's options without those that every chart shares. */
export type ChartOptions = Pick<uPlot.Options, "series"> & {
  y: uPlot.Scale;
  yAxis: uPlot.Axis;
  xAxis: uPlot.Axis;
};

/** What a chart passes to its plot. */
export interface PlotParts {
  /** The element that the plot fills. */
  box: HTMLElement;
  /** Shown while there is no point. */
  emptyText: HTMLElement;
  /** Creates uPlot's options from the current colours and preferences. */
  createOptions: () => ChartOptions;
  /** Shows the values at an index of the x axis (null: the last one) and returns them as text. */
  showReadout: (index: number | null) => string;
}

const FIRST_HIDDEN_MS = 4_000; // until its first points: what readers see comes first
const KEYBOARD_STEPS = 60; // arrow keys that it takes at most from one end of the axis to the other
const KEYBOARD_ZOOM = 0.6; // what a press of + leaves of the shown section
const MIN_DRAG = 6; // pixels; a shorter drag is a click
const OUTSIDE = { left: -10, top: -10 }; // a cursor position that hides the cursor
const DAY = 86_400; // seconds
const MINUTE_INCREMENTS = [1, 2, 5, 10, 15, 30, 60, 120, 360, 720].map((minutes) => minutes * 60);
const DAY_INCREMENTS = [1, 2, 5, 10, 30, 100, 365].map((days) => days * DAY);

/** One plot with its cursor. */
export class Plot implements GroupedChart {
  data: PlotData = [[]];
  private chart: uPlot | null = null;
  private createData: (() => PlotData) | null = null; // of points that are newer than `data`
  private preparedAt = performance.now(); // milliseconds since the page was opened
  private cost = 0; // milliseconds that the last new points took
  private size = { width: 0, height: 0 }; // of the box
  private isUrgent = false; // whether newer points are computed at once
  private isChanged = false; // since it was drawn
  private isInView = false;
  private hasFocus = false;
  private isFollowing = false; // the cursor of another chart

  constructor(
    private readonly parts: PlotParts,
    private readonly group: ChartGroup,
  ) {
    const { box } = parts;
    group.add(this);
    // The observer knows the size; reading it elsewhere would make the browser lay out the page.
    new ResizeObserver((entries) => {
      const { width, height } = entries.at(-1)!.contentRect;
      this.size = { width: Math.round(width), height: Math.round(height) };
      this.chart?.setSize(this.size);
    }).observe(box);
    // A chart that nobody sees is not drawn.
    watchVisibility(box, (isInView) => {
      this.isInView = isInView;
      if (isInView) this.drawAtOnce();
    });
    onThemeChange(document, () => {
      colours.clear();
      this.rebuild();
    });
    // A canvas does not repaint itself when its font has been loaded.
    void document.fonts.ready.then(() => this.rebuild());
    box.addEventListener("keydown", (event) => this.handleKey(event));
    box.addEventListener("focus", () => {
      this.hasFocus = true;
      this.drawAtOnce();
    });
    box.addEventListener("blur", () => {
      this.hasFocus = false;
      this.chart?.setCursor(OUTSIDE);
    });
  }

  /** Whether somebody sees the chart, or reads it with the keyboard wherever the page is scrolled. */
  private get isVisible(): boolean {
    return this.isInView || this.hasFocus;
  }

  /** Show the newest points now. */
  private drawAtOnce(): void {
    this.isUrgent = true;
    this.isChanged = true;
    this.group.draw();
  }

  get extent(): Section | null {
    const xs = this.data[0];
    return xs.length ? [xs[0]!, xs.at(-1)!] : null;
  }

  /** Show these points with the group's next drawing. */
  show(data: PlotData): void {
    this.offer(() => data);
    this.isUrgent = true;
  }

  /** Show the points that a function computes, when a drawing of new points is due. */
  offer(createData: () => PlotData): void {
    this.createData = createData;
  }

  prepare(): void {
    const now = performance.now();
    const isDue = now - this.preparedAt >= this.findInterval();
    if (!this.createData || !(isDue || this.isUrgent)) return;
    this.data = this.createData();
    this.createData = null;
    this.preparedAt = now;
    this.cost = performance.now() - now;
    this.isUrgent = false;
    this.isChanged = true;
    this.parts.emptyText.hidden = this.data[0].length > 0;
    if (!this.isVisible) this.showCursor(null);
  }

  draw(hasNewRange: boolean): void {
    if (!this.isVisible || !(this.isChanged || hasNewRange)) return;
    this.isChanged = false;
    const start = performance.now();
    const hasSameCurves = this.chart?.series.length === this.data.length;
    if (this.chart && hasSameCurves && this.data[0].length) {
      this.chart.setData(this.data as uPlot.AlignedData);
    } else {
      this.createChart();
    }
    this.showCursor(this.chart?.cursor.idx ?? null);
    // uPlot draws in a microtask.
    queueMicrotask(() => (this.cost += performance.now() - start));
  }

  /** Return the milliseconds from the last new points to the next ones. */
  private findInterval(): number {
    const isFirst = !this.data[0].length;
    if (isFirst) return this.isVisible ? 0 : FIRST_HIDDEN_MS;
    if (!this.isVisible) return Infinity; // it gets them as soon as somebody sees it
    const [low, high] = this.group.section;
    return findChartInterval(
      this.cost,
      findPixelTime(high - low, this.size.width, this.group.speed),
    );
  }

  /** Create the chart again, because its colours, its curves or its axes have changed. */
  rebuild(): void {
    this.isUrgent = true;
    if (this.chart) this.createChart();
  }

  showPosition(x: number | null): void {
    if (!this.chart || !this.isVisible) return;
    this.isFollowing = true;
    const left = x === null ? OUTSIDE.left : this.chart.valToPos(x, "x");
    this.chart.setCursor(left < 0 ? OUTSIDE : { left, top: 0 });
    this.isFollowing = false;
  }

  /** Return the drawing as an image with the page's background, and a line of text above it. */
  drawImage(title: string): HTMLCanvasElement | null {
    const source = this.chart?.ctx.canvas;
    if (!source) return null;
    const image = document.createElement("canvas");
    const scale = source.width / Math.max(1, this.parts.box.clientWidth);
    const margin = Math.round(30 * scale);
    image.width = source.width;
    image.height = source.height + margin;
    const context = image.getContext("2d")!;
    context.fillStyle = readColour("--surface");
    context.fillRect(0, 0, image.width, image.height);
    context.fillStyle = readColour("--text");
    context.font = `600 ${Math.round(14 * scale)}px ${readColour("--font-sans")}`;
    context.fillText(title, Math.round(8 * scale), Math.round(20 * scale));
    context.drawImage(source, 0, margin);
    return image;
  }

  private createChart(): void {
    this.chart?.destroy();
    this.chart = null;
    if (!this.data[0].length) return;
    const { series, y, yAxis, xAxis } = this.parts.createOptions();
    const options: uPlot.Options = {
      ...this.size,
      series,
      scales: { x: { time: false, range: () => this.group.section }, y },
      axes: [axisOptions(xAxis), axisOptions(yAxis)],
      legend: { show: false },
      cursor: {
        y: false,
        drag: { x: true, y: false, setScale: false },
        points: { size: 9, width: 2 },
        bind: {
          dblclick: () => () => {
            this.group.zoomTo(null);
            return null;
          },
        },
      },
      hooks: {
        setCursor: [(chart) => this.followCursor(chart)],
        setSelect: [(chart) => this.zoomToSelection(chart)],
      },
    };
    this.chart = new uPlot(options, this.data as uPlot.AlignedData, this.parts.box);
  }

  private zoomToSelection(chart: uPlot): void {
    const { left, width } = chart.select;
    if (width < MIN_DRAG) return;
    const section: Section = [chart.posToVal(left, "x"), chart.posToVal(left + width, "x")];
    chart.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.group.zoomTo(section);
  }

  private followCursor(chart: uPlot): void {
    const index = chart.cursor.idx ?? null;
    this.showCursor(index);
    if (this.isFollowing) return;
    const x = index === null || (chart.cursor.left ?? -1) < 0 ? null : this.data[0][index]!;
    this.group.moveCursor(this, x);
  }

  /**
   * Show the values at the cursor.
   *
   * A plot with points has the role of a slider: screen readers then pass the arrow keys on and
   * read the values that the cursor reaches.
   */
  private showCursor(index: number | null): void {
    const text = this.parts.showReadout(index);
    const last = this.data[0].length - 1;
    if (last < 0) return;
    const { box } = this.parts;
    box.setAttribute("role", "slider");
    box.setAttribute("aria-valuemin", "0");
    box.setAttribute("aria-valuemax", String(last));
    box.setAttribute("aria-valuenow", String(index ?? last));
    box.setAttribute("aria-valuetext", text);
  }

  private handleKey(event: KeyboardEvent): void {
    const xs = this.data[0];
    if (!this.chart || !xs.length || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === "Escape") this.chart.setCursor(OUTSIDE);
    if (this.zoomByKey(event.key)) {
      event.preventDefault();
      return;
    }
    const target = this.findKeyTarget(event.key, this.chart.cursor.idx ?? xs.length - 1);
    if (target === null) return;
    event.preventDefault();
    this.chart.setCursor({ left: this.chart.valToPos(xs[target]!, "x"), top: 0 });
  }

  /** Zoom by a key; return whether it is one that zooms. */
  private zoomByKey(key: string): boolean {
    const index = this.chart?.cursor.idx;
    const centre = index == null ? undefined : this.data[0][index];
    if (key === "+" || key === "=") this.group.zoomBy(KEYBOARD_ZOOM, centre);
    else if (key === "-") this.group.zoomBy(1 / KEYBOARD_ZOOM, centre);
    else if (key === "0") this.group.zoomTo(null);
    else return false;
    return true;
  }

  /** Return the index that a key moves the cursor to, or null if it does not move it. */
  private findKeyTarget(key: string, current: number): number | null {
    const [low, high] = this.group.section;
    const xs = this.data[0];
    const first = Math.max(0, xs.findIndex((x) => x >= low));
    const beyond = xs.findIndex((x) => x > high);
    const last = Math.max(first, (beyond < 0 ? xs.length : beyond) - 1);
    const step = Math.max(1, Math.ceil((last - first) / KEYBOARD_STEPS));
    switch (key) {
      case "ArrowLeft":
      case "ArrowDown":
        return Math.max(first, current - step);
      case "ArrowRight":
      case "ArrowUp":
        return Math.min(last, current + step);
      case "Home":
        return first;
      case "End":
        return last;
      default:
        return null;
    }
  }
}

// Reading a property makes the browser compute the page's styles.
const colours = new Map<string, string>();

/** Read a custom property of the page, such as a colour of the current theme. */
export function readColour(name: string): string {
  let colour = colours.get(name);
  if (colour === undefined) {
    colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    colours.set(name, colour);
  }
  return colour;
}

/** Complete an axis by the page's font and colours. */
function axisOptions(axis: uPlot.Axis): uPlot.Axis {
  const line = { stroke: readColour("--chart-grid"), width: 1 };
  return {
    font: `500 12px ${readColour("--font-sans")}`,
    stroke: readColour("--text-muted"),
    grid: line,
    ticks: { ...line, size: 4 },
    border: { show: false },
    ...axis,
  };
}

/** Create the x axis that the reader has selected. */
export function createXAxis(axis: XAxis): uPlot.Axis {
  if (axis === "time") return timeAxis();
  const format = axis === "active" ? formatAxisDuration : formatAxisCount;
  return { values: (_plot, marks) => marks.map(format), space: 90, size: 30 };
}

/** Create an x axis in seconds since 1970 that shows times of day, or days over a long time. */
export function timeAxis(): uPlot.Axis {
  return {
    space: 80,
    size: 30,
    incrs: [...MINUTE_INCREMENTS, ...DAY_INCREMENTS],
    values: (_plot, marks, _axis, _space, increment) =>
      marks.map((time) => (increment < DAY ? formatClock(time).slice(0, 5) : formatDay(time))),
  };
}

/** Leave out where a curve over time has no measurements: uPlot would draw a straight line there. */
export function findPauseGaps(plot: uPlot, curve: number): uPlot.Series.Gaps {
  return placeGaps(plot, findPauses(listTimes(plot, curve)));
}

/**
 * Return how the curves of losses and the like pass over positions without a point.
 *
 * Only the time of day goes on while nobody trains: along it a straight line would state losses
 * that nobody measured.
 *
 * @param rate - returns the run's speeds, [seconds since 1970, tokens per second]
 */
export function leaveOutPauses(axis: XAxis, rate: () => Point[]): uPlot.Series {
  if (axis !== "time") return { spanGaps: true };
  return {
    spanGaps: false,
    gaps: (plot, curve) =>
      placeGaps(plot, findGapsInPauses(listTimes(plot, curve), findTrainingPauses(rate()))),
  };
}

/** Return the positions at which a curve has a point. */
function listTimes(plot: uPlot, curve: number): number[] {
  const values = plot.data[curve]!;
  const times: number[] = [];
  for (let i = 0; i < values.length; i++) {
    if (values[i] != null) times.push(plot.data[0][i]!);
  }
  return times;
}

function placeGaps(plot: uPlot, gaps: Section[]): uPlot.Series.Gaps {
  return gaps.map(([from, to]) => [plot.valToPos(from, "x", true), plot.valToPos(to, "x", true)]);
}

/**
 * Return the range of the values that a plot shows now, in all curves; null without values.
 *
 * What it leaves out is marked in the plot's corner.
 */
export function findVisibleRange(plot: uPlot, ignoresOutliers: boolean): [number, number] | null {
  const [first, last] = plot.series[0]!.idxs ?? [0, plot.data[0].length - 1];
  const values: number[] = [];
  for (const column of plot.data.slice(1)) {
    for (let i = first; i <= last; i++) {
      const value = column[i];
      if (value != null) values.push(value);
    }
  }
  const range = findRange(values, ignoresOutliers);
  markClipped(plot, range ? values.filter((value) => value > range[1]).length : 0);
  return range;
}

/** Say in a corner of the plot how many points lie above it. */
function markClipped(plot: uPlot, count: number): void {
  const box = plot.root.parentElement;
  if (!box) return;
  let mark = box.querySelector<HTMLElement>(".clipped-mark");
  if (!mark) {
    if (count === 0) return;
    mark = document.createElement("span");
    mark.className = "clipped-mark small muted";
    mark.setAttribute("aria-hidden", "true");
    box.append(mark);
  }
  mark.textContent = count > 0 ? `${count.toLocaleString("en-US")} above` : "";
}
