// Frames as live/ sends them, for the tests.

import type { Delta, RunEvent, PlanView, Snapshot, Machine } from "../src/types";

export function worker(id: string, tokens = 0): Machine {
  return {
    id, name: id, person: "Ada", activity: "training", alive: true, last_seen: 100, version: "0.1", tokens, rate: 10,
    step: 1, step_seconds: null, updates_sent: 1, updates_received: 2, peers: 2, behind: 0, exchange: null, agrees: null,
  };
}

export function plan(more: Partial<PlanView> = {}): PlanView {
  return {
    device: "cpu", device_bytes: 0, host_bytes: 3 * 2 ** 30, disk_bytes: 9 * 2 ** 30, groups: 12, micro_batches: 4,
    micro_tokens: 1024, layers: 50, resident: 3, clipping: "exact", crash_safety: "exact", binding: "disk",
    predicted_seconds: 5.4, disk_written_per_day: 384 * 2 ** 30, sentence: "The disk is what limits.", ...more,
  };
}

export function snapshot(seq: number, more: Partial<Snapshot> = {}): Snapshot {
  return {
    type: "snapshot", seq, mirror: "here", now: 100 + seq,
    run: {
      id: "r", name: "Run", status: "training", tokens: 1000, budget: 10_000, rate: 10, started: 1, updates: 3,
      workers_alive: 1, workers_known: 1, agree: null, waiting: null,
    },
    train: [[100, 5]], validation: [], rate: [], clock: [], workers: [worker("a")], plans: {},
    events: [], ...more,
  };
}

export function delta(seq: number, more: Partial<Delta> = {}): Delta {
  return { type: "delta", seq, now: 100 + seq, ...more };
}

export function event(id: string, at: number, more: Partial<RunEvent> = {}): RunEvent {
  return { id, at, kind: "machine", who: "barn", what: "joined", ...more };
}
