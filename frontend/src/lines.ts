// Machines' own lines, fetched while somebody looks at them: in a large run they would be most of every frame.

import type { Store } from "./store";
import type { Line } from "./types";

export const EVERY = 10_000; // ms between two looks

export interface LinesOutside {
  fetch(): Promise<Line[]>;
  later(milliseconds: number, run: () => void): number;
  cancel(timer: number): void;
}

export class LineFeed {
  private wanted = false;
  private timer: number | null = null;

  constructor(private readonly store: Store, private readonly outside: LinesOutside) {}

  want(wanted: boolean): void {
    if (wanted === this.wanted) return;
    this.wanted = wanted;
    if (this.timer !== null) this.outside.cancel(this.timer);
    this.timer = null;
    if (wanted) void this.look();
  }

  /** A look that fails leaves what is there; the next one comes all the same. */
  private async look(): Promise<void> {
    const found = await this.outside.fetch().catch((error: unknown) => {
      console.info("the machines' lines did not come:", error);
      return null;
    });
    if (!this.wanted || this.timer !== null) return; // changed their mind meanwhile, perhaps twice
    if (found) this.store.setLines(found);
    this.timer = this.outside.later(EVERY, () => {
      this.timer = null;
      void this.look();
    });
  }
}

/** `base`: of the mirror that is asked just now; "" for the page's own. */
export function browserLines(run: string, base: () => string): LinesOutside {
  return {
    async fetch() {
      const answer = await fetch(`${base()}/live/${run}/machines/`, {
        headers: { Accept: "application/json" },
        credentials: base() ? "omit" : "same-origin",
      });
      if (!answer.ok) throw new Error(`the site answered ${answer.status}`);
      return ((await answer.json()) as { machines: Line[] }).machines;
    },
    later: (milliseconds, run) => window.setTimeout(run, milliseconds),
    cancel: (timer) => window.clearTimeout(timer),
  };
}
