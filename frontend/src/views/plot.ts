// What our charts share: a uPlot that fits its box, wears the page's colours, and can be read by mouse and by arrow keys.

import "uplot/dist/uPlot.min.css";
import uPlot from "uplot";
import { onThemeChange } from "../theme";

type Data = [number[], ...(number | null)[][]];

export class Plot {
  data: Data = [[]];
  private chart: uPlot | null = null;

  constructor(
    private readonly box: HTMLElement,
    private readonly empty: HTMLElement,
    private readonly options: () => Omit<uPlot.Options, "width" | "height">,
    /** Shows what stands there (null: at the end), and says it. */
    private readonly read: (index: number | null) => string,
  ) {
    new ResizeObserver(() => this.chart?.setSize(this.size())).observe(box);
    onThemeChange(document, () => this.rebuild());
    void document.fonts.ready.then(() => this.rebuild()); // a canvas does not repaint itself when its font arrives
    box.addEventListener("keydown", (event) => this.key(event));
    box.addEventListener("blur", () => this.chart?.setCursor({ left: -10, top: -10 }));
  }

  show(data: Data): void {
    this.data = data;
    this.empty.hidden = data[0].length > 0;
    if (this.chart?.series.length === data.length && data[0].length) this.chart.setData(data as uPlot.AlignedData);
    else this.rebuild();
    this.tell(this.chart?.cursor.idx ?? null);
  }

  /** With points on it, it is a slider along them: that is how a screen reader passes the arrow keys on, and reads what
   *  they lead to. */
  private tell(index: number | null): void {
    const text = this.read(index);
    const last = this.data[0].length - 1;
    if (last < 0) return;
    const now = index ?? last;
    const said = { role: "slider", "aria-valuemin": 0, "aria-valuemax": last, "aria-valuenow": now, "aria-valuetext": text };
    for (const [name, value] of Object.entries(said)) this.box.setAttribute(name, String(value));
  }

  rebuild(): void {
    this.chart?.destroy();
    this.chart = null;
    if (!this.data[0].length) return;
    const options: uPlot.Options = {
      ...this.size(),
      ...this.options(),
      legend: { show: false },
      cursor: { y: false, drag: { x: false, y: false }, points: { size: 9, width: 2 } },
      hooks: { setCursor: [(chart) => this.tell(chart.cursor.idx ?? null)] },
    };
    this.chart = new uPlot(options, this.data as uPlot.AlignedData, this.box);
  }

  private size(): { width: number; height: number } {
    return { width: this.box.clientWidth, height: this.box.clientHeight };
  }

  private key(event: KeyboardEvent): void {
    const chart = this.chart;
    const last = this.data[0].length - 1;
    if (!chart || last < 0) return;
    const now = chart.cursor.idx ?? last;
    const step = Math.max(1, Math.round(last / 60));
    const next = {
      ArrowLeft: now - step, ArrowDown: now - step, ArrowRight: now + step, ArrowUp: now + step, Home: 0, End: last,
    }[event.key];
    if (event.key === "Escape") chart.setCursor({ left: -10, top: -10 });
    if (next === undefined) return;
    event.preventDefault();
    const x = this.data[0][Math.max(0, Math.min(last, next))]!;
    chart.setCursor({ left: chart.valToPos(x, "x"), top: 0 });
  }
}

export function colour(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function axis(more: uPlot.Axis): uPlot.Axis {
  const line = { stroke: colour("--grid"), width: 1 };
  return {
    font: `500 12px ${colour("--sans")}`,
    stroke: colour("--muted"),
    grid: line,
    ticks: { ...line, size: 4 },
    border: { show: false },
    ...more,
  };
}

const HOURS = [1, 2, 5, 10, 15, 30, 60, 120, 360, 720].map((minutes) => minutes * 60);
const DAYS = [1, 2, 5, 10, 30, 100, 365].map((days) => days * 86_400);

/** An x axis in seconds since 1970: times of day, or days where it spans several. */
export function timeAxis(): uPlot.Axis {
  return {
    space: 80,
    size: 30,
    incrs: [...HOURS, ...DAYS],
    values: (_u, splits, _axis, _space, increment) => splits.map((at) => (increment < 86_400 ? clock(at).slice(0, 5) : day(at))),
  };
}

export function clock(seconds: number): string {
  return new Date(seconds * 1000).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

function day(seconds: number): string {
  return new Date(seconds * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short" });
}
