// The state of a run on its page. Pure: it receives snapshots and deltas, and neither fetches nor
// draws anything.
//
// A snapshot replaces everything, and deltas are applied in their order (deltaOrder.ts). Applying
// is idempotent: points are keyed by their x, machines, plans and events by id, and values are
// absolute.

import { DeltaOrder, type Outcome } from "./deltaOrder";
import type {
  Delta,
  ExchangeView,
  Machine,
  MachineChanges,
  PlanView,
  Point,
  Run,
  RunEvent,
  Snapshot,
  WorkerCurve,
} from "./types";

const CURVE_NAMES = [
  "train",
  "validation",
  "clock",
  "learning_rate",
  "gradient_norm",
  "rate",
  "machines",
  "sent",
  "received",
  "staleness",
] as const;
export type CurveName = (typeof CURVE_NAMES)[number];

const MAX_POINTS = 1000; // of one curve; beyond that neighbours are merged
const MAX_EVENTS = 200; // the newest are stored

function createEmptyCurves(): Record<CurveName, Point[]> {
  const entries = CURVE_NAMES.map((name): [CurveName, Point[]] => [name, []]);
  return Object.fromEntries(entries) as Record<CurveName, Point[]>;
}

/** Everything that the page shows of a run. */
export class Store {
  run: Run | null = null;
  /** Whether no message has arrived for so long that what is shown may be wrong. */
  isSilent = false;
  readonly workers = new Map<string, Machine>();
  readonly plans = new Map<string, PlanView>();
  readonly curves = createEmptyCurves();
  /** The newest first. */
  events: RunEvent[] = [];
  /** The curves of the machines that trained most; empty unless the reader wants to see them. */
  workerCurves: WorkerCurve[] = [];
  private readonly order = new DeltaOrder();
  private readonly listeners = new Set<() => void>();

  /** Call `listener` after each change; the returned function ends that. */
  subscribe(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** The number of the last applied delta; -1 before the first snapshot. */
  get seq(): number {
    return this.order.seq;
  }

  /** The mirror's clock, in seconds since 1970. */
  get now(): number {
    return this.order.now;
  }

  /** Whether deltas wait for an earlier one that is missing. */
  get hasGap(): boolean {
    return this.order.hasGap;
  }

  /** Accept any number next: the next snapshot comes from a mirror that numbers its own deltas. */
  expectOtherMirror(): void {
    this.order.expectOtherMirror();
  }

  /** Replace the state by a snapshot, unless a newer message has overtaken it. */
  applySnapshot(snapshot: Snapshot): Outcome {
    if (!this.order.acceptSnapshot(snapshot)) return "stale";
    this.run = { ...snapshot.run };
    this.workers.clear();
    for (const worker of snapshot.workers) this.workers.set(worker.id, worker);
    this.plans.clear();
    this.storePlans(snapshot.plans);
    this.events = mergeEvents([], snapshot.events ?? []);
    for (const name of CURVE_NAMES) {
      this.curves[name] = thinCurve(name, mergePoints([], snapshot[name] ?? []));
    }
    return this.finishChange();
  }

  /** Apply a delta if it is the next one; store it until then if it is early. */
  applyDelta(delta: Delta): Outcome {
    return this.applyDeltas([delta]);
  }

  /** Apply deltas that arrived together, and notify the listeners once. */
  applyDeltas(deltas: Delta[]): Outcome {
    let outcome: Outcome = "stale";
    let hasChanged = false;
    for (const delta of deltas) {
      const accepted = this.order.accept(delta);
      if (accepted === "applied") {
        this.applyChanges(delta);
        hasChanged = true;
      } else if (accepted === "gap") outcome = "gap";
    }
    return hasChanged ? this.finishChange() : outcome;
  }

  /** State whether messages have stopped arriving. */
  setSilent(isSilent: boolean): void {
    if (isSilent === this.isSilent) return;
    this.isSilent = isSilent;
    this.notify();
  }

  /** Replace the machines' curves, which are fetched apart from snapshots and deltas. */
  setCurves(curves: WorkerCurve[]): void {
    this.workerCurves = curves.map((curve) => ({
      ...curve,
      points: mergePoints([], curve.points),
      rates: mergePoints([], curve.rates),
    }));
    this.notify();
  }

  /** Apply the waiting deltas that have become the next ones, and notify the listeners. */
  private finishChange(): Outcome {
    for (const delta of this.order.releaseWaiting()) this.applyChanges(delta);
    this.notify();
    return this.hasGap ? "gap" : "applied";
  }

  private applyChanges(delta: Delta): void {
    if (delta.run && this.run) Object.assign(this.run, delta.run);
    for (const id of delta.removed_workers ?? []) this.workers.delete(id);
    for (const worker of delta.workers ?? []) this.workers.set(worker.id, worker);
    for (const changes of delta.worker_changes ?? []) this.changeMachine(changes);
    this.storePlans(delta.plans);
    if (delta.events) this.events = mergeEvents(this.events, delta.events);
    for (const name of CURVE_NAMES) {
      const points = delta[name];
      if (points?.length) {
        this.curves[name] = thinCurve(name, mergePoints(this.curves[name], points));
      }
    }
  }

  /** Change fields of a machine. Its row becomes a new object, by which views know the change. */
  private changeMachine(changes: MachineChanges): void {
    const machine = this.workers.get(changes.id);
    if (!machine) return;
    const changed = Object.assign({}, machine, changes) as Machine;
    // An exchange lists only what changed of it.
    if (machine.exchange && changes.exchange) {
      changed.exchange = Object.assign({}, machine.exchange, changes.exchange) as ExchangeView;
    }
    this.workers.set(changes.id, changed);
  }

  private storePlans(plans: Record<string, PlanView> = {}): void {
    for (const [id, plan] of Object.entries(plans)) this.plans.set(id, plan);
  }

  private notify(): void {
    for (const listener of this.listeners) listener();
  }
}

/** Merge two lists of events: the newest first, each once, at most MAX_EVENTS. */
export function mergeEvents(present: RunEvent[], added: RunEvent[]): RunEvent[] {
  const byId = new Map([...present, ...added].map((event) => [event.id, event] as const));
  return [...byId.values()].sort(compareEvents).slice(0, MAX_EVENTS);
}

/** Order events by time, the newest first; events of one moment by id, for a stable order. */
function compareEvents(a: RunEvent, b: RunEvent): number {
  if (a.at !== b.at) return b.at - a.at;
  return a.id < b.id ? 1 : -1;
}

/** Merge two curves in the order of x. Where both have a point, the added one wins. */
export function mergePoints(present: Point[], added: Point[]): Point[] {
  const lastX = present.at(-1)?.[0] ?? -Infinity;
  const continues = added.every((point, i) => point[0] > (added[i - 1]?.[0] ?? lastX));
  if (continues) return present.concat(added);
  const byX = new Map(present.map((point) => [point[0], point] as const));
  for (const point of added) byX.set(point[0], point);
  return [...byX.values()].sort((a, b) => a[0] - b[0]);
}

/** Thin a curve. A mean of two times would lie within an outage, where nothing was measured. */
function thinCurve(name: CurveName, points: Point[]): Point[] {
  return thinPoints(points, name === "clock" ? selectSecond : averageAtSecond);
}

type Merge = (first: Point, second: Point) => Point;
const averageAtSecond: Merge = (first, second) => [second[0], (first[1] + second[1]) / 2];
export const selectSecond: Merge = (_first, second) => second;

/**
 * Reduce a curve to `limit` points.
 *
 * Two neighbours become one, by default their mean at the later x. The newest quarter of `limit`
 * is unchanged.
 */
export function thinPoints(
  points: Point[],
  merge: Merge = averageAtSecond,
  limit = MAX_POINTS,
): Point[] {
  if (points.length <= limit) return points;
  const unchanged = Math.floor(limit / 4);
  const old = points.slice(0, -unchanged);
  const merged: Point[] = [];
  for (let i = 0; i < old.length; i += 2) {
    const first = old[i]!;
    const second = old[i + 1];
    merged.push(second ? merge(first, second) : first);
  }
  return thinPoints(merged.concat(points.slice(-unchanged)), merge, limit);
}
