// The state of a run on its page. Pure: it receives snapshots and deltas, and neither fetches nor draws anything.
//
// A snapshot replaces everything. Delta n+1 follows the snapshot or delta n. A delta that arrives twice is dropped; one
// that arrives early waits for the deltas before it, and the caller learns of the gap so that it can fetch a snapshot.
// Applying is idempotent: points are keyed by their first number, machines, plans and events by id, and values are absolute.

import type { Delta, RunEvent, WorkerCurve, Point, PlanView, Run, Snapshot, Machine } from "./types";

export type Outcome = "applied" | "stale" | "gap";
export type SeriesName = "train" | "validation" | "rate" | "clock";
/** The points of each curve. */
export type Series = Record<SeriesName, Point[]>;

const MAX_WAITING = 64; // deltas that may wait for an earlier one
const MAX_POINTS = 1600; // of one curve; beyond that neighbours are merged
const MAX_EVENTS = 200; // the newest are stored

export class Store {
  seq = -1;
  now = 0;
  run: Run | null = null;
  readonly workers = new Map<string, Machine>();
  readonly plans = new Map<string, PlanView>();
  readonly series: Series = { train: [], validation: [], rate: [], clock: [] };
  /** The newest first. */
  events: RunEvent[] = [];
  /** The curves of the machines that trained most; empty until somebody wants to see them. */
  curves: WorkerCurve[] = [];
  private waiting = new Map<number, Delta>();
  private listeners = new Set<() => void>();

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Whether deltas wait for an earlier one that is missing. */
  get hasGap(): boolean {
    return this.waiting.size > 0;
  }

  /** Accept any number next: another mirror numbers its own deltas, and its first snapshot replaces everything. */
  expectOtherMirror(): void {
    this.seq = -1;
    this.now = 0;
    this.waiting.clear();
  }

  applySnapshot(snapshot: Snapshot): Outcome {
    if (snapshot.seq < this.seq && snapshot.now < this.now) return "stale"; // a newer message overtook this response
    this.seq = snapshot.seq;
    this.now = snapshot.now;
    this.run = { ...snapshot.run };
    this.workers.clear();
    for (const worker of snapshot.workers) this.workers.set(worker.id, worker);
    this.plans.clear();
    this.storePlans(snapshot.plans);
    this.events = mergeEvents([], snapshot.events ?? []);
    for (const name of NAMES) this.series[name] = thinPoints(mergePoints([], snapshot[name] ?? []));
    this.applyWaiting();
    this.notify();
    return this.hasGap ? "gap" : "applied";
  }

  applyDelta(delta: Delta): Outcome {
    if (this.run !== null && delta.seq <= this.seq) return "stale";
    if (this.run === null || delta.seq > this.seq + 1) {
      this.waiting.set(delta.seq, delta);
      if (this.waiting.size > MAX_WAITING) this.waiting.delete(Math.min(...this.waiting.keys()));
      return "gap";
    }
    this.apply(delta);
    this.applyWaiting();
    this.notify();
    return this.hasGap ? "gap" : "applied";
  }

  /** Replace the machines' curves, which are fetched apart from snapshots and deltas. */
  setCurves(curves: WorkerCurve[]): void {
    this.curves = curves.map((curve) => ({ ...curve, points: mergePoints([], curve.points) }));
    this.notify();
  }

  private applyWaiting(): void {
    for (const seq of [...this.waiting.keys()].sort((a, b) => a - b)) {
      const delta = this.waiting.get(seq)!;
      if (seq === this.seq + 1) this.apply(delta);
      if (seq <= this.seq) this.waiting.delete(seq);
    }
  }

  private apply(delta: Delta): void {
    this.seq = delta.seq;
    this.now = delta.now;
    if (delta.run && this.run) Object.assign(this.run, delta.run);
    for (const machine of delta.removed_workers ?? []) this.workers.delete(machine);
    for (const worker of delta.workers ?? []) this.workers.set(worker.id, worker);
    this.storePlans(delta.plans);
    if (delta.events) this.events = mergeEvents(this.events, delta.events);
    for (const name of NAMES) {
      const fresh = delta[name];
      if (fresh?.length) this.series[name] = thinPoints(mergePoints(this.series[name], fresh));
    }
  }

  private storePlans(plans: Record<string, PlanView> = {}): void {
    for (const [machine, plan] of Object.entries(plans)) this.plans.set(machine, plan);
  }

  private notify(): void {
    for (const listener of this.listeners) listener();
  }
}

const NAMES: readonly SeriesName[] = ["train", "validation", "rate", "clock"];

/** Merge two lists of events: the newest first, each once, at most MAX_EVENTS. */
export function mergeEvents(known: RunEvent[], fresh: RunEvent[]): RunEvent[] {
  const byId = new Map([...known, ...fresh].map((event) => [event.id, event] as const));
  return [...byId.values()].sort((a, b) => b.at - a.at || (a.id < b.id ? 1 : -1)).slice(0, MAX_EVENTS);
}

/** Merge two curves in the order of x. Where both have a point, the fresh one wins. */
export function mergePoints(known: Point[], fresh: Point[]): Point[] {
  const last = known.at(-1);
  const ordered = fresh.every((pair, i) => pair[0] > (fresh[i - 1]?.[0] ?? last?.[0] ?? -Infinity));
  if (ordered) return known.concat(fresh);
  const byKey = new Map(known.map((pair) => [pair[0], pair] as const));
  for (const pair of fresh) byKey.set(pair[0], pair);
  return [...byKey.values()].sort((a, b) => a[0] - b[0]);
}

/** Reduce a curve to `limit` points: neighbours become their mean at the later x; the newest quarter is unchanged. */
export function thinPoints(points: Point[], limit = MAX_POINTS): Point[] {
  if (points.length <= limit) return points;
  const kept = Math.floor(limit / 4);
  const old = points.slice(0, -kept);
  const merged: Point[] = [];
  for (let i = 0; i < old.length; i += 2) {
    const [a, b] = [old[i]!, old[i + 1]];
    merged.push(b ? [b[0], (a[1] + b[1]) / 2] : a);
  }
  return thinPoints(merged.concat(points.slice(-kept)), limit);
}
