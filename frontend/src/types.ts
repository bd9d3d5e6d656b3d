// What the site's live/ says of a run: a snapshot over HTTP, then numbered deltas over the websocket.

/** [ledger tokens, loss in nats a token] or [seconds since 1970, tokens/s]. */
export type Pair = [number, number];

export type Status = "draft" | "recruiting" | "training" | "paused" | "finished" | "cancelled";

export interface Run {
  id: string;
  name: string;
  status: Status;
  /** In the ledger, by everybody. */
  tokens: number;
  budget: number;
  /** Tokens/s over all machines that are alive. */
  rate: number;
  /** Seconds since 1970; null until training started. */
  started: number | null;
  updates: number;
  workers_alive: number;
  workers_known: number;
  /** Whether machines with the same updates hold the same weights; null while there is nothing to compare. */
  agree: boolean | null;
  /** What the run waits for, as a sentence. */
  waiting: string | null;
}

export interface Worker {
  id: string;
  name: string;
  person: string;
  activity: string;
  alive: boolean;
  last_seen: number;
  version: string;
  tokens: number;
  rate: number;
  step: number;
  /** Of one step as measured, beside what the machine's plan predicts; null until there is one. */
  step_seconds: number | null;
  updates_sent: number;
  updates_received: number;
  peers: number;
  behind: number;
  /** How it trades its updates; null until it has published one. */
  exchange: Exchange | null;
  /** Whether it holds the weights that most machines with the same updates hold; null while there is nothing to compare. */
  agrees: boolean | null;
}

export interface Exchange {
  round_steps: number;
  /** Of its updates: "dense4", "top64x2". */
  scheme: string;
  /** The part of all values that an update says. */
  density: number;
  /** A parameter, all told. */
  bits_per_parameter: number;
  /** Bytes a second. */
  sent_rate: number;
  received_rate: number;
  /** What its line has been measured to carry; 0 while that is not known. */
  uplink_rate: number;
  /** Updates that its peers have and it lacks. */
  lag: number;
}

/** How a machine has decided to train. */
export interface Plan {
  device: string;
  device_bytes: number;
  host_bytes: number;
  disk_bytes: number;
  /** Of a step's forward pass. */
  groups: number;
  micro_batches: number;
  micro_tokens: number;
  layers: number;
  /** Layers whose training state stays in memory. */
  resident: number;
  clipping: "none" | "exact" | "layer";
  crash_safety: "exact" | "restart" | "round";
  /** The resource that limits. */
  binding: string;
  /** Of one step. */
  predicted_seconds: number;
  /** Bytes. */
  disk_written_per_day: number;
  sentence: string;
}

/** By machine. */
export type Plans = Record<string, Plan>;

export interface Series {
  train: Pair[];
  validation: Pair[];
  rate: Pair[];
  /** When training stood at so many tokens: [ledger tokens, seconds since 1970]. */
  clock: Pair[];
}

/** Something that happened in the run: "who what", both plain text that others wrote. */
export interface Event {
  id: string;
  /** Seconds since 1970. */
  at: number;
  kind: "run" | "machine" | "weights";
  who: string;
  what: string;
}

/** What one machine measured in training. */
export interface Line {
  id: string;
  name: string;
  points: Pair[];
}

export interface Snapshot extends Series {
  type: "snapshot";
  seq: number;
  mirror: string;
  /** The mirror's clock, seconds since 1970. */
  now: number;
  run: Run;
  workers: Worker[];
  plans: Plans;
  /** The newest first. */
  events: Event[];
}

export interface Delta extends Partial<Series> {
  type: "delta";
  seq: number;
  now: number;
  run?: Partial<Run>;
  workers?: Worker[];
  /** Machines that are shown no more, where others took their place. */
  gone?: string[];
  /** Those that changed. */
  plans?: Plans;
  /** Those that are new. */
  events?: Event[];
}
