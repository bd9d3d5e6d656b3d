// What the page says above its figures: since when they are delayed, and what the run waits for.

import { requireElement, setText } from "../dom";
import { formatMoment } from "../format";
import type { Store } from "../store";

/** Shows the two notices. Unlike other views it also draws before the first snapshot. */
export class RunNotices {
  private readonly delayed: HTMLElement;
  private readonly delayedSince: HTMLElement;
  private readonly goesOn: HTMLElement;
  private readonly waiting: HTMLElement;
  private readonly waitingText: HTMLElement;
  private readonly renderedAt: number; // when what the server wrote was true, as far as it knows

  /** `loadedAt`: when the server wrote the page, in seconds since 1970. */
  constructor(page: HTMLElement, loadedAt: number) {
    this.delayed = requireElement(page, "[data-delayed]");
    this.delayedSince = requireElement(this.delayed, "[data-delayed-since]");
    this.goesOn = requireElement(this.delayed, "[data-goes-on]");
    this.waiting = requireElement(page, "[data-waiting]");
    this.waitingText = requireElement(this.waiting, "[data-waiting-text]");
    this.renderedAt = Number(this.delayedSince.dataset.delayedSince) || loadedAt;
  }

  draw(store: Store): void {
    const { run } = store;
    if (!run && !store.isSilent) return; // what the server wrote still holds
    const since = findDelay(store, this.renderedAt);
    if (since !== null) setText(this.delayedSince, formatMoment(since, Date.now() / 1000));
    this.delayed.hidden = since === null;
    if (run) {
      this.goesOn.hidden = run.status !== "training";
      setText(this.waitingText, run.waiting ?? "");
    }
    // What a run waits for follows from figures: delayed ones would state what is no longer true.
    this.waiting.hidden = since !== null || !run?.waiting;
  }
}

/**
 * Return since when the figures are delayed, in seconds since 1970; null: they are current.
 *
 * Either the site says so, or nothing has arrived from it for a while. Before the first message the
 * figures are those of `renderedAt`.
 */
export function findDelay(store: Store, renderedAt: number): number | null {
  const reported = store.run?.delayed_since ?? null;
  if (!store.isSilent) return reported;
  return Math.min(reported ?? Infinity, store.now || renderedAt);
}
