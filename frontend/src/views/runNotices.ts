// What the page says above its figures: since when they are delayed, what the run waits for, or how
// it stands.

import { requireElement, setText } from "../dom";
import { formatDuration, formatInteger, formatMoment } from "../format";
import type { Store } from "../store";
import type { Run } from "../types";

const BEFORE_FIRST_EXCHANGE =
  "The shared weights are still those of the start: until the first exchange is through the " +
  "validation loss does not fall.";

/** Shows one of three notices. Unlike other views it also draws before the first snapshot. */
export class RunNotices {
  private readonly delayed: HTMLElement;
  private readonly delayedSince: HTMLElement;
  private readonly goesOn: HTMLElement;
  private readonly waiting: HTMLElement;
  private readonly waitingText: HTMLElement;
  private readonly summary: HTMLElement;
  private readonly summaryText: HTMLElement;
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
      setText(this.summaryText, summarizeRun(run));
    }
    // What a run waits for follows from figures: delayed ones would state what is no longer true.
    this.waiting.hidden = since !== null || !run?.waiting;
    this.summary.hidden = since !== null || Boolean(run?.waiting);
  }
}

/** Return how a run stands, in a sentence. */
export function summarizeRun(run: Run): string {
  const count = run.workers_alive;
  const machines = count === 1 ? "1 machine" : `${formatInteger(count)} machines`;
  switch (run.status) {
    case "draft":
      return "A draft: it starts once it is launched.";
    case "recruiting":
      return "Open to machines: training starts when they are ready.";
    case "training": {
      const seconds = (run.budget - run.tokens) / run.rate;
      const left = run.rate > 0 && seconds > 0 ? `, about ${formatDuration(seconds)} left` : "";
      const trains = count === 1 ? `1 machine trains${left}.` : `${machines} train${left}.`;
      return count > 0 && run.updates === 0 ? `${trains} ${BEFORE_FIRST_EXCHANGE}` : trains;
    }
    case "paused":
      return `Paused. ${count === 1 ? "1 machine waits" : `${machines} wait`} with all its progress.`;
    case "finished":
      return "Finished: the final weights are below, under Checkpoints.";
    case "cancelled":
      return "Cancelled. Machines keep what they have trained.";
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
