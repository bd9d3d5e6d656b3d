// Example messages of the site for the tests; `changes` replaces single fields.

import type { Delta, ExchangeView, Machine, PlanView, RunEvent, Snapshot } from "../src/types";

/** Create a machine that trains and reports. */
export function createMachine(id: string, tokens = 0): Machine {
  return {
    id,
    name: id,
    person: "Ada",
    activity: "training",
    alive: true,
    last_seen: 100,
    version: "0.1",
    tokens,
    rate: 10,
    step: 1,
    step_seconds: null,
    updates_sent: 1,
    updates_received: 2,
    peers: 2,
    exchange: null,
    agrees: null,
    pause: null,
    crew: [],
  };
}

/** Create the exchange of a machine that is not behind its peers. */
export function createExchange(): ExchangeView {
  return {
    round_steps: 20,
    scheme: "dense4",
    density: 1,
    bits_per_parameter: 4,
    sent_rate: 1e5,
    received_rate: 2e5,
    uplink_rate: 1e6,
    lag: 0,
    relayed: 0,
    reached: true,
    suspended: [],
  };
}

/** Create the plan of a machine without a GPU that trains from its disk. */
export function createPlan(changes: Partial<PlanView> = {}): PlanView {
  return {
    device: "cpu",
    device_bytes: 0,
    host_bytes: 3 * 2 ** 30,
    disk_bytes: 9 * 2 ** 30,
    groups: 12,
    micro_batches: 4,
    micro_tokens: 1024,
    layers: 50,
    resident: 3,
    clipping: "exact",
    crash_safety: "exact",
    binding: "disk",
    predicted_seconds: 5.4,
    disk_written_per_day: 384 * 2 ** 30,
    sentence: "The disk is what limits.",
    ...changes,
  };
}

/** Create a snapshot with one machine and one point. */
export function createSnapshot(seq: number, changes: Partial<Snapshot> = {}): Snapshot {
  return {
    type: "snapshot",
    seq,
    mirror: "here",
    now: 100 + seq,
    run: {
      id: "r",
      name: "Run",
      status: "training",
      tokens: 1000,
      people: 1,
      budget: 10_000,
      rate: 10,
      started: 1,
      ended: null,
      updates: 3,
      workers_alive: 1,
      workers_known: 1,
      people_known: 1,
      training_loss: 5,
      validation_loss: null,
      score: null,
      confirmed_by: 0,
      tiles: ["validation", "train", "rate", "machines", "agree"],
      cards: ["charts", "progress", "join", "machines", "connections", "checkpoints"],
      notice: "1 machine trains.",
      is_live: true,
      agree: null,
      waiting: null,
      event_count: 0,
      delayed_since: null,
    },
    train: [[100, 5]],
    validation: [],
    clock: [],
    learning_rate: [],
    gradient_norm: [],
    rate: [],
    machines: [],
    sent: [],
    received: [],
    staleness: [],
    workers: [createMachine("a")],
    plans: {},
    events: [],
    ...changes,
  };
}

/** Create a delta that changes nothing. */
export function createDelta(seq: number, changes: Partial<Delta> = {}): Delta {
  return { type: "delta", seq, now: 100 + seq, ...changes };
}

/** Create the event that a machine joined. */
export function createEvent(id: string, at: number, changes: Partial<RunEvent> = {}): RunEvent {
  return { id, at, kind: "machine", who: "barn", what: "joined", ...changes };
}
