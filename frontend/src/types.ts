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
  updates_sent: number;
  updates_received: number;
  peers: number;
  behind: number;
}

export interface Series {
  train: Pair[];
  validation: Pair[];
  rate: Pair[];
}

export interface Snapshot extends Series {
  type: "snapshot";
  seq: number;
  mirror: string;
  /** The mirror's clock, seconds since 1970. */
  now: number;
  run: Run;
  workers: Worker[];
}

export interface Delta extends Partial<Series> {
  type: "delta";
  seq: number;
  now: number;
  run?: Partial<Run>;
  workers?: Worker[];
}
