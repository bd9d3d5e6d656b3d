// The charts of a page together: they show the same section of the x axis, and a cursor in one of
// them moves the cursors in all.

/** A chart, as its group sees it. */
export interface GroupedChart {
  /** The first and last x of its points; null without points. */
  readonly extent: [number, number] | null;
  /** Compute the points that are due. */
  prepare(): void;
  /** Draw what has changed; `hasNewRange`: the shown section of the x axis has changed. */
  draw(hasNewRange: boolean): void;
  /** Show the values at a position of the x axis; null hides the cursor. */
  showPosition(x: number | null): void;
}

export type Section = [number, number];

const MIN_CHANGE = 1 / 2000; // of the section's length; charts are narrower in pixels

/** The shared section of the x axis, and the shared cursor. */
export class ChartGroup {
  /** The section that the reader has zoomed to; null: everything. */
  zoom: Section | null = null;
  /** By which the curves grow, in units of the x axis per second. */
  speed = Infinity;
  private readonly charts: GroupedChart[] = [];
  private readonly listeners: (() => void)[] = [];
  private drawnSection: Section = [NaN, NaN];

  add(chart: GroupedChart): void {
    this.charts.push(chart);
  }

  /** Call `listener` after each zoom. */
  onZoom(listener: () => void): void {
    this.listeners.push(listener);
  }

  /** The section of the x axis that all charts show. */
  get section(): Section {
    if (this.zoom) return this.zoom;
    let [low, high] = [Infinity, -Infinity];
    for (const { extent } of this.charts) {
      low = Math.min(low, extent?.[0] ?? Infinity);
      high = Math.max(high, extent?.[1] ?? -Infinity);
    }
    if (low > high) return [0, 1];
    return [low, high > low ? high : low + 1];
  }

  /** Draw all charts that have changed; a section that differs visibly changes all. */
  draw(): void {
    for (const chart of this.charts) chart.prepare();
    const section = this.section;
    const hasNewRange = !isAlike(section, this.drawnSection);
    if (hasNewRange) this.drawnSection = section;
    for (const chart of this.charts) chart.draw(hasNewRange);
  }

  /** Show this section of the x axis; null: everything. */
  zoomTo(section: Section | null): void {
    this.zoom = section && section[1] > section[0] ? section : null;
    this.draw();
    for (const listener of this.listeners) listener();
  }

  /** Zoom in (factor below 1) or out around the middle of the shown section, or around `centre`. */
  zoomBy(factor: number, centre?: number): void {
    const [low, high] = this.section;
    const middle = centre ?? (low + high) / 2;
    const next: Section = [middle - (middle - low) * factor, middle + (high - middle) * factor];
    this.zoom = null;
    const [first, last] = this.section;
    const isEverything = next[0] <= first && next[1] >= last;
    this.zoomTo(isEverything ? null : [Math.max(first, next[0]), Math.min(last, next[1])]);
  }

  /** Move the cursors of the other charts to `x`; null hides them. */
  moveCursor(source: GroupedChart, x: number | null): void {
    for (const chart of this.charts) if (chart !== source) chart.showPosition(x);
  }
}

/** Return whether two sections differ by less than readers can see. */
function isAlike(a: Section, b: Section): boolean {
  const change = Math.max(Math.abs(a[0] - b[0]), Math.abs(a[1] - b[1]));
  return change <= MIN_CHANGE * (a[1] - a[0]);
}
