// What the charts share: a uPlot that fills its box, has the page's colours, and can be read with a
// mouse and with the arrow keys.

import "uplot/dist/uPlot.min.css";
import uPlot from "uplot";
import { formatClock, formatDay } from "../format";
import { onThemeChange } from "../theme";

/** The x axis, and the values of each curve on it; null where a curve has no point. */
export type PlotData = [number[], ...(number | null)[][]];

/** What a chart passes to its plot. */
export interface PlotParts {
  /** The element that the plot fills. */
  box: HTMLElement;
  /** Shown while there is no point. */
  emptyText: HTMLElement;
  /** Creates uPlot's options from the current colours and preferences. */
  createOptions: () => Omit<uPlot.Options, "width" | "height">;
  /** Shows the values at an index of the x axis (null: the last one) and returns them as text. */
  showReadout: (index: number | null) => string;
}

const KEYBOARD_STEPS = 60; // arrow keys that it takes from one end of the axis to the other
const OUTSIDE = { left: -10, top: -10 }; // a cursor position that hides the cursor
const DAY = 86_400; // seconds
const MINUTE_INCREMENTS = [1, 2, 5, 10, 15, 30, 60, 120, 360, 720].map((minutes) => minutes * 60);
const DAY_INCREMENTS = [1, 2, 5, 10, 30, 100, 365].map((days) => days * DAY);

/** One plot with its cursor. */
export class Plot {
  data: PlotData = [[]];
  private chart: uPlot | null = null;

  constructor(private readonly parts: PlotParts) {
    const { box } = parts;
    new ResizeObserver(() => this.chart?.setSize(this.measureBox())).observe(box);
    onThemeChange(document, () => this.rebuild());
    // A canvas does not repaint itself when its font has been loaded.
    void document.fonts.ready.then(() => this.rebuild());
    box.addEventListener("keydown", (event) => this.handleKey(event));
    box.addEventListener("blur", () => this.chart?.setCursor(OUTSIDE));
  }

  /** Draw these points. */
  show(data: PlotData): void {
    this.data = data;
    this.parts.emptyText.hidden = data[0].length > 0;
    const hasSameCurves = this.chart?.series.length === data.length;
    if (this.chart && hasSameCurves && data[0].length) {
      this.chart.setData(data as uPlot.AlignedData);
    } else {
      this.rebuild();
    }
    this.showCursor(this.chart?.cursor.idx ?? null);
  }

  /** Create the chart again, because its colours, its curves or its axes have changed. */
  rebuild(): void {
    this.chart?.destroy();
    this.chart = null;
    if (!this.data[0].length) return;
    const options: uPlot.Options = {
      ...this.measureBox(),
      ...this.parts.createOptions(),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 9, width: 2 } },
      hooks: { setCursor: [(chart) => this.showCursor(chart.cursor.idx ?? null)] },
    };
    this.chart = new uPlot(options, this.data as uPlot.AlignedData, this.parts.box);
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

  private measureBox(): { width: number; height: number } {
    return { width: this.parts.box.clientWidth, height: this.parts.box.clientHeight };
  }

  private handleKey(event: KeyboardEvent): void {
    const xs = this.data[0];
    if (!this.chart || !xs.length) return;
    if (event.key === "Escape") this.chart.setCursor(OUTSIDE);
    const target = this.findKeyTarget(event.key, this.chart.cursor.idx ?? xs.length - 1);
    if (target === null) return;
    event.preventDefault();
    this.chart.setCursor({ left: this.chart.valToPos(xs[target]!, "x"), top: 0 });
  }

  /** Return the index that a key moves the cursor to, or null if it does not move it. */
  private findKeyTarget(key: string, current: number): number | null {
    const last = this.data[0].length - 1;
    const step = Math.max(1, Math.round(last / KEYBOARD_STEPS));
    switch (key) {
      case "ArrowLeft":
      case "ArrowDown":
        return Math.max(0, current - step);
      case "ArrowRight":
      case "ArrowUp":
        return Math.min(last, current + step);
      case "Home":
        return 0;
      case "End":
        return last;
      default:
        return null;
    }
  }
}

/** Read a custom property of the page, such as a colour of the current theme. */
export function readColour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Complete an axis by the page's font and colours. */
export function axisOptions(axis: uPlot.Axis): uPlot.Axis {
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
