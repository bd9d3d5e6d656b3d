// What the page says above its figures: since when they are delayed, what the run waits for, or how
// it stands.

import { requireElement, setText } from "../dom";
import { formatMoment } from "../format";
import type { Store } from "../store";

/** Shows one of three notices. Unlike other views it also draws before the first snapshot. */
export class RunNotices {
  private readonly delayed: HTMLElement;
  private readonly delayedSince: HTMLElement;
  private readonly goesOn: HTMLElement;
  private readonly waiting: HTMLElement;
  private readonly waitingText: HTMLElement;
  private readonly summary: HTMLElement;
  private readonly summaryText: HTMLElement;
  private readonly modelLink: HTMLElement;
  /** Whether it was drawn while no messages arrive. */
  isSilent = false;
  private readonly renderedAt: number; // when what the server wrote was true, as far as it knows

  /** `loadedAt`: when the server wrote the page, in seconds since 1970. */
  constructor(page: HTMLElement, loadedAt: number) {
    this.delayed = requireElement(page, "[data-delayed]");
    this.delayedSince = requireElement(this.delayed, "[data-delayed-since]");
    this.goesOn = requireElement(this.delayed, "[data-goes-on]");
    this.waiting = requireElement(page, "[data-waiting]");
    this.waitingText = requireElement(this.waiting, "[data-waiting-text]");
    this.summary = requireElement(page, "[data-summary-line]");
    this.summaryText = requireElement(this.summary, "[data-summary-text]");
    this.modelLink = requireElement(this.summary, "[data-model-link]");
    this.renderedAt = Number(this.delayedSince.dataset.delayedSince) || loadedAt;
  }

  draw(store: Store): void {
    const { run } = store;
    this.isSilent = store.isSilent;
    if (!run && !store.isSilent) return; // what the server wrote still holds
    const since = findDelay(store, this.renderedAt);
    if (since !== null) setText(this.delayedSince, formatMoment(since, Date.now() / 1000));
    this.delayed.hidden = since === null;
    if (run) {
      this.goesOn.hidden = run.status !== "training";
      if (run.waiting) setText(this.waitingText, run.waiting);
      setText(this.summaryText, run.notice);
      this.modelLink.hidden = run.status !== "finished";
    }
    // What a run waits for follows from figures: delayed ones would state what is no longer true.
    this.waiting.hidden = since !== null || !run?.waiting;
    this.summary.hidden = since !== null || Boolean(run?.waiting);
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
