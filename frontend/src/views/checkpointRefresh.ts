// The table of checkpoints, which the server renders: it is fetched again when there is a new
// checkpoint, and when the run's status changes.

import type { Store } from "../store";

const MIN_INTERVAL_MS = 5_000; // between two requests

/** Lets htmx fetch the card of checkpoints again. */
export class CheckpointRefresh {
  private shown: string | null = null; // what the card shows
  private timer: number | null = null;

  constructor(private readonly page: HTMLElement) {}

  draw(store: Store): void {
    const newest = store.events.find((event) => event.kind === "checkpoint")?.id ?? "";
    const state = `${newest} ${store.run?.status ?? ""}`;
    const isFirst = this.shown === null;
    if (state === this.shown) return;
    this.shown = state;
    if (isFirst || this.timer !== null) return;
    // The site confirms a checkpoint some seconds after it was announced.
    this.timer = window.setTimeout(() => {
      this.timer = null;
      this.page.querySelector("#checkpoints")?.dispatchEvent(new Event("refresh"));
    }, MIN_INTERVAL_MS);
  }
}
