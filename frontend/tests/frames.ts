// Frames as live/ sends them, for the tests.

import type { Delta, Snapshot, Worker } from "../src/types";

export function worker(id: string, tokens = 0): Worker {
  return {
    id, name: id, person: "Ada", activity: "training", alive: true, last_seen: 100, version: "0.1", tokens, rate: 10,
    step: 1, updates_sent: 1, updates_received: 2, peers: 2, behind: 0,
  };
}

export function snapshot(seq: number, more: Partial<Snapshot> = {}): Snapshot {
  return {
    type: "snapshot", seq, mirror: "here", now: 100 + seq,
    run: {
      id: "r", name: "Run", status: "training", tokens: 1000, budget: 10_000, rate: 10, started: 1, updates: 3,
      workers_alive: 1, agree: null, waiting: null,
    },
    train: [[100, 5]], validation: [], rate: [], workers: [worker("a")], ...more,
  };
}

export function delta(seq: number, more: Partial<Delta> = {}): Delta {
  return { type: "delta", seq, now: 100 + seq, ...more };
}
