// The order of a run's deltas. Pure.
//
// Delta n+1 follows the snapshot or delta n. A delta that arrives twice is dropped; one that arrives
// early waits for the deltas before it, and the caller learns of the gap so that it can fetch a
// snapshot.

import type { Delta, Snapshot } from "./types";

/** What a snapshot or delta led to; at a "gap" deltas are missing. */
export type Outcome = "applied" | "stale" | "gap";

const MAX_WAITING = 64; // deltas that may wait for an earlier one

/** Decides which deltas are next, and stores those that are early. */
export class DeltaOrder {
  /** The number of the last applied delta; -1 before the first snapshot. */
  seq = -1;
  /** The mirror's clock, in seconds since 1970. */
  now = 0;
  private hasSnapshot = false;
  private readonly waiting = new Map<number, Delta>();

  /** Whether deltas wait for an earlier one that is missing. */
  get hasGap(): boolean {
    return this.waiting.size > 0;
  }

  /** Accept any number next: the next snapshot comes from a mirror that numbers its own deltas. */
  expectOtherMirror(): void {
    this.seq = -1;
    this.now = 0;
    this.waiting.clear();
  }

  /** Continue after a snapshot; return false if a newer message has overtaken it. */
  acceptSnapshot(snapshot: Snapshot): boolean {
    if (snapshot.seq < this.seq && snapshot.now < this.now) return false;
    this.hasSnapshot = true;
    this.moveTo(snapshot);
    return true;
  }

  /** Return "applied" if the delta is the next one, and "gap" if it has been stored until then. */
  accept(delta: Delta): Outcome {
    if (!this.hasSnapshot || delta.seq > this.seq + 1) {
      this.waiting.set(delta.seq, delta);
      if (this.waiting.size > MAX_WAITING) this.waiting.delete(Math.min(...this.waiting.keys()));
      return "gap";
    }
    if (delta.seq <= this.seq) return "stale";
    this.moveTo(delta);
    return "applied";
  }

  /** Remove and return the waiting deltas that have become the next ones, in their order. */
  releaseWaiting(): Delta[] {
    const released: Delta[] = [];
    for (const seq of [...this.waiting.keys()].sort((a, b) => a - b)) {
      const delta = this.waiting.get(seq)!;
      if (seq === this.seq + 1) {
        this.moveTo(delta);
        released.push(delta);
      }
      if (seq <= this.seq) this.waiting.delete(seq);
    }
    return released;
  }

  private moveTo({ seq, now }: { seq: number; now: number }): void {
    this.seq = seq;
    this.now = now;
  }
}
