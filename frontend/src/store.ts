// What the page knows of its run. Pure: frames in, state out; it asks for nothing and draws nothing.
//
// A snapshot replaces everything; delta n+1 follows frame n. What comes twice is dropped, what comes early waits for the
// one before it, and the caller is told of the gap so that it can fetch a snapshot. Applying is idempotent: points are
// keyed by their first number, workers, their plans and events by id, and the run's values are absolute.

import type { Delta, Event, Line, Pair, Plan, Plans, Run, Series, Snapshot, Worker } from "./types";

export type Outcome = "applied" | "stale" | "gap";
export type SeriesName = keyof Series;

const EARLY = 64; // deltas that may wait for one before them
const POINTS = 1600; // of one series; beyond that neighbours are merged
const EVENTS = 200; // the newest

export class Store {
  seq = -1;
  now = 0;
  run: Run | null = null;
  readonly workers = new Map<string, Worker>();
  readonly plans = new Map<string, Plan>();
  readonly series: Series = { train: [], validation: [], rate: [], clock: [] };
  /** The newest first. */
  events: Event[] = [];
  /** Of the machines that trained most, where somebody asked for them. */
  lines: Line[] = [];
  private early = new Map<number, Delta>();
  private listeners = new Set<() => void>();

  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** True while deltas wait for one that has not come. */
  get gap(): boolean {
    return this.early.size > 0;
  }

  /** From here on frames are another mirror's, which numbers its own: its first snapshot takes the place of all. */
  elsewhere(): void {
    this.seq = -1;
    this.now = 0;
    this.early.clear();
  }

  snapshot(frame: Snapshot): Outcome {
    if (frame.seq < this.seq && frame.now < this.now) return "stale"; // an answer that was overtaken on its way
    this.seq = frame.seq;
    this.now = frame.now;
    this.run = { ...frame.run };
    this.workers.clear();
    for (const worker of frame.workers) this.workers.set(worker.id, worker);
    this.plans.clear();
    this.plan(frame.plans);
    this.events = mingle([], frame.events ?? []);
    for (const name of NAMES) this.series[name] = thin(merge([], frame[name] ?? []));
    this.drain();
    this.tell();
    return this.gap ? "gap" : "applied";
  }

  delta(frame: Delta): Outcome {
    if (this.run !== null && frame.seq <= this.seq) return "stale";
    if (this.run === null || frame.seq > this.seq + 1) {
      this.early.set(frame.seq, frame);
      if (this.early.size > EARLY) this.early.delete(Math.min(...this.early.keys()));
      return "gap";
    }
    this.take(frame);
    this.drain();
    this.tell();
    return this.gap ? "gap" : "applied";
  }

  /** Machines' own lines come apart from the frames, whole each time. */
  setLines(lines: Line[]): void {
    this.lines = lines.map((line) => ({ ...line, points: merge([], line.points) }));
    this.tell();
  }

  private drain(): void {
    for (const seq of [...this.early.keys()].sort((a, b) => a - b)) {
      const frame = this.early.get(seq)!;
      if (seq === this.seq + 1) this.take(frame);
      if (seq <= this.seq) this.early.delete(seq);
    }
  }

  private take(frame: Delta): void {
    this.seq = frame.seq;
    this.now = frame.now;
    if (frame.run && this.run) Object.assign(this.run, frame.run);
    for (const machine of frame.gone ?? []) this.workers.delete(machine);
    for (const worker of frame.workers ?? []) this.workers.set(worker.id, worker);
    this.plan(frame.plans);
    if (frame.events) this.events = mingle(this.events, frame.events);
    for (const name of NAMES) {
      const fresh = frame[name];
      if (fresh?.length) this.series[name] = thin(merge(this.series[name], fresh));
    }
  }

  private plan(plans: Plans = {}): void {
    for (const [machine, plan] of Object.entries(plans)) this.plans.set(machine, plan);
  }

  private tell(): void {
    for (const listener of this.listeners) listener();
  }
}

const NAMES: readonly SeriesName[] = ["train", "validation", "rate", "clock"];

/** The newest first, each once, and no more than a list can bear. */
export function mingle(known: Event[], fresh: Event[]): Event[] {
  const byId = new Map([...known, ...fresh].map((event) => [event.id, event] as const));
  return [...byId.values()].sort((a, b) => b.at - a.at || (a.id < b.id ? 1 : -1)).slice(0, EVENTS);
}

/** Both in order of their first number, each of which stays once: the later word wins. */
export function merge(known: Pair[], fresh: Pair[]): Pair[] {
  const last = known.at(-1);
  const ordered = fresh.every((pair, i) => pair[0] > (fresh[i - 1]?.[0] ?? last?.[0] ?? -Infinity));
  if (ordered) return known.concat(fresh);
  const byKey = new Map(known.map((pair) => [pair[0], pair] as const));
  for (const pair of fresh) byKey.set(pair[0], pair);
  return [...byKey.values()].sort((a, b) => a[0] - b[0]);
}

/** At most POINTS: neighbours become their mean, at the later one's place; the newest quarter stays as it is. */
export function thin(points: Pair[], limit = POINTS): Pair[] {
  if (points.length <= limit) return points;
  const kept = Math.floor(limit / 4);
  const old = points.slice(0, -kept);
  const merged: Pair[] = [];
  for (let i = 0; i < old.length; i += 2) {
    const [a, b] = [old[i]!, old[i + 1]];
    merged.push(b ? [b[0], (a[1] + b[1]) / 2] : a);
  }
  return thin(merged.concat(points.slice(-kept)), limit);
}
