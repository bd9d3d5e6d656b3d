// The loss curves of single machines. They are fetched only while they are shown, because in a
// large run they would be most of every delta.

import type { Store } from "./store";
import type { WorkerCurve, WorkerCurves } from "./types";

export const FETCH_INTERVAL_MS = 10_000; // between a response and the next request

/** What the loader needs from its surroundings; tests pass their own. */
export interface CurveEnvironment {
  fetchCurves(): Promise<WorkerCurve[]>;
  setTimer(milliseconds: number, callback: () => void): number;
  clearTimer(timer: number): void;
}

/** Fetches the machines' curves into the store, repeatedly while it is enabled. */
export class WorkerCurveLoader {
  private enabled = false;
  private timer: number | null = null;

  constructor(
    private readonly store: Store,
    private readonly environment: CurveEnvironment,
  ) {}

  /** Start or stop fetching. */
  setEnabled(enabled: boolean): void {
    if (enabled === this.enabled) return;
    this.enabled = enabled;
    if (this.timer !== null) this.environment.clearTimer(this.timer);
    this.timer = null;
    if (enabled) void this.loadCurves();
  }

  /** Fetch the curves and schedule the next request. After a failure the shown curves stay. */
  private async loadCurves(): Promise<void> {
    const curves = await this.environment.fetchCurves().catch((error: unknown) => {
      console.info("the machines' curves could not be fetched:", error);
      return null;
    });
    // The loader may have been disabled in the meantime, or disabled and enabled again.
    if (!this.enabled || this.timer !== null) return;
    if (curves) this.store.setCurves(curves);
    this.timer = this.environment.setTimer(FETCH_INTERVAL_MS, () => {
      this.timer = null;
      void this.loadCurves();
    });
  }
}

/**
 * Create the environment of a real page.
 *
 * @param currentBase - returns the address of the mirror in use; "" for the page's own
 */
export function createBrowserCurveEnvironment(
  runId: string,
  currentBase: () => string,
): CurveEnvironment {
  return {
    async fetchCurves() {
      const base = currentBase();
      const response = await fetch(`${base}/live/${runId}/machines/`, {
        headers: { Accept: "application/json" },
        credentials: base ? "omit" : "same-origin",
      });
      if (!response.ok) throw new Error(`the site answered ${response.status}`);
      return ((await response.json()) as WorkerCurves).machines;
    },
    setTimer: (milliseconds, callback) => window.setTimeout(callback, milliseconds),
    clearTimer: (timer) => window.clearTimeout(timer),
  };
}
