// Machines' own loss curves. They are fetched only while they are shown: in a large run they would dominate every delta.

import type { Store } from "./store";
import type { WorkerCurve } from "./types";

export const FETCH_INTERVAL_MS = 10_000; // between two requests

export interface CurveEnvironment {
  fetch(): Promise<WorkerCurve[]>;
  later(milliseconds: number, run: () => void): number;
  cancel(timer: number): void;
}

export class WorkerCurveLoader {
  private enabled = false;
  private timer: number | null = null;

  constructor(private readonly store: Store, private readonly outside: CurveEnvironment) {}

  setEnabled(enabled: boolean): void {
    if (enabled === this.enabled) return;
    this.enabled = enabled;
    if (this.timer !== null) this.outside.cancel(this.timer);
    this.timer = null;
    if (enabled) void this.fetchCurves();
  }

  /** Fetch the curves and schedule the next request. After a failure the shown curves stay. */
  private async fetchCurves(): Promise<void> {
    const found = await this.outside.fetch().catch((error: unknown) => {
      console.info("the machines' curves could not be fetched:", error);
      return null;
    });
    if (!this.enabled || this.timer !== null) return; // disabled in the meantime, or enabled again
    if (found) this.store.setCurves(found);
    this.timer = this.outside.later(FETCH_INTERVAL_MS, () => {
      this.timer = null;
      void this.fetchCurves();
    });
  }
}

/** Create the browser's environment. `base` returns the address of the mirror in use; "" is the page's own. */
export function browserCurveEnvironment(run: string, base: () => string): CurveEnvironment {
  return {
    async fetch() {
      const answer = await fetch(`${base()}/live/${run}/machines/`, {
        headers: { Accept: "application/json" },
        credentials: base() ? "omit" : "same-origin",
      });
      if (!answer.ok) throw new Error(`the site answered ${answer.status}`);
      return ((await answer.json()) as { machines: WorkerCurve[] }).machines;
    },
    later: (milliseconds, run) => window.setTimeout(run, milliseconds),
    cancel: (timer) => window.clearTimeout(timer),
  };
}
