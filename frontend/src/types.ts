// The messages to the page of a run. This file is generated from
// platform/coordinator/live/live_messages.py: edit that file, then run
// `PYTHONPATH=platform:worker .venv/bin/python -m coordinator.live.typescript`.

/** What a machine does in a run now. */
export type Activity = "preparing" | "joining" | "training" | "paused" | "suspended" | "finishing" | "finished" | "left" | "fetching";

/** A part of the page below its head that some states lack. */
export type Card = "steps" | "samples" | "charts" | "progress" | "join" | "model" | "machines" | "connections" | "checkpoints";

/** One machine of a crew, and the blocks that it holds. */
export interface CrewSeat {
  name: string;
  first_block: number;
  blocks: number;
  /** Of the crew's FLOPs, from 0 to 1. */
  share: number;
  /** Whether its lead reaches it. */
  connected: boolean;
}

/** What changed since the delta before it. A field without changes is absent. */
export interface Delta {
  type: "delta";
  /** The delta's number: one more than the previous one's, unless watchers may miss something. */
  seq: number;
  /** The mirror's clock, in seconds since 1970. */
  now: number;
  run?: RunChanges;
  /** Whole rows of machines that were not shown before. */
  workers?: Machine[];
  /** The fields that changed of machines that were shown before. */
  worker_changes?: MachineChanges[];
  /** The ids of machines that are no longer shown. */
  removed_workers?: string[];
  /** New and changed plans, by the machine's id. */
  plans?: Record<string, PlanView>;
  /** New events, the newest first. */
  events?: RunEvent[];
  train?: Point[];
  validation?: Point[];
  clock?: Point[];
  learning_rate?: Point[];
  gradient_norm?: Point[];
  rate?: Point[];
  machines?: Point[];
  sent?: Point[];
  received?: Point[];
  staleness?: Point[];
}

/** Those figures of a machine's exchange that changed; the others are absent. */
export interface ExchangeChanges {
  round_steps?: number;
  scheme?: string;
  density?: number;
  bits_per_parameter?: number;
  sent_rate?: number;
  received_rate?: number;
  uplink_rate?: number;
  lag?: number;
  relayed?: number;
  reached?: boolean;
  suspended?: string[];
}

/** How a machine exchanges its updates, for people to read. */
export interface ExchangeView {
  round_steps: number;
  scheme: string;
  density: number;
  bits_per_parameter: number;
  sent_rate: number;
  received_rate: number;
  uplink_rate: number;
  lag: number;
  relayed?: number;
  reached?: boolean;
  suspended?: string[];
}

/** A figure in the page's head. */
export type HeadTile = "validation" | "train" | "score" | "final" | "rate" | "machines" | "agree" | "tokens" | "contributors" | "elapsed" | "confirmed" | "updates";

/** One machine of a run: a row of the table on the run's page. */
export interface Machine {
  id: string;
  name: string;
  /** The name of its owner. */
  person: string;
  activity: Activity;
  /** Whether it reports. */
  alive: boolean;
  /** Seconds since 1970. */
  last_seen: number;
  version: string;
  /** Tokens that this machine has published. */
  tokens: number;
  /** Tokens per second; 0 if it does not report. */
  rate: number;
  step: number;
  /** Measured duration of one step; null until one was measured. */
  step_seconds: number | null;
  updates_sent: number;
  updates_received: number;
  /** Peers that it is connected to. */
  peers: number;
  /** How it exchanges updates; null until it has published one. */
  exchange: ExchangeView | null;
  /** Whether its weights are those of most machines with the same updates; null if unknown. */
  agrees: boolean | null;
  /** Why it takes no steps; null while it does, and from machines of older versions. */
  pause: PauseView | null;
  /** The crew that it leads, itself first; empty if it leads none. */
  crew: CrewSeat[];
}

/** Those fields of a machine that changed; the others are absent. */
export interface MachineChanges {
  id: string;
  name?: string;
  /** The name of its owner. */
  person?: string;
  activity?: Activity;
  /** Whether it reports. */
  alive?: boolean;
  /** Seconds since 1970. */
  last_seen?: number;
  version?: string;
  /** Tokens that this machine has published. */
  tokens?: number;
  /** Tokens per second; 0 if it does not report. */
  rate?: number;
  step?: number;
  /** Measured duration of one step; null until one was measured. */
  step_seconds?: number | null;
  updates_sent?: number;
  updates_received?: number;
  /** Peers that it is connected to. */
  peers?: number;
  /** Those figures that changed, all if there were none before; null if there are none now. */
  exchange?: ExchangeChanges | null;
  /** Whether its weights are those of most machines with the same updates; null if unknown. */
  agrees?: boolean | null;
  /** Why it takes no steps; null while it does, and from machines of older versions. */
  pause?: PauseView | null;
  /** The crew that it leads, itself first; empty if it leads none. */
  crew?: CrewSeat[];
}

/**
 * Why a machine takes no steps although its run is not over.
 *
 * It says nothing of the machine's programs or its figures: everybody who sees the run sees it.
 */
export type PauseReason = "here" | "site" | "run" | "recruiting" | "hours" | "in_use" | "battery" | "busy" | "program" | "hot" | "traffic" | "disk_writes" | "rules" | "owner";

/** Why a machine takes no steps, and until when, where that is known. */
export interface PauseView {
  reason: PauseReason;
  until?: number | null;
}

/** How a machine has decided to train, for people to read. */
export interface PlanView {
  device: string;
  device_bytes: number;
  host_bytes: number;
  disk_bytes: number;
  groups: number;
  micro_batches: number;
  micro_tokens: number;
  layers: number;
  resident: number;
  clipping: "none" | "exact" | "layer";
  crash_safety: "exact" | "restart" | "round";
  binding: string;
  predicted_seconds: number;
  disk_written_per_day: number;
  sentence: string;
}

/** One point of a curve: [x, y]. */
export type Point = [number, number];

/** The values of a run as a whole. */
export interface Run {
  id: string;
  name: string;
  status: RunStatus;
  /** Tokens in the ledger: the median over people of what their machines have. */
  tokens: number;
  /** People who vouch for that number. */
  people: number;
  /** Tokens after which the training ends. */
  budget: number;
  /** Tokens per second over all machines that report, bounded by what other people saw. */
  rate: number;
  /** Seconds since 1970; null until the training starts. */
  started: number | null;
  /** Seconds since 1970; null until the run is finished or cancelled. */
  ended: number | null;
  /** Updates that all machines have published. */
  updates: number;
  /** Machines that have trained, or that are here to train. */
  workers_known: number;
  /** The people whose machines these are. */
  people_known: number;
  /** Those of them that report. */
  workers_alive: number;
  /** Nats per token over the last section of the curve, a median over people; null before any. */
  training_loss: number | null;
  /** The last one, in nats per token, a median over people; null before the first. */
  validation_loss: number | null;
  /** The share of the run's tasks that its last weights answered; null before an evaluation. */
  score: number | null;
  /** People who confirm the final weights; 0 until they are confirmed. */
  confirmed_by: number;
  /** The figures in the page's head, in their order. */
  tiles: HeadTile[];
  /** The parts of the page below its head. */
  cards: Card[];
  /** A sentence about how the run stands. */
  notice: string;
  /** Whether figures can still change. */
  is_live: boolean;
  /** Whether machines with the same updates have the same weights; null if unknown. */
  agree: boolean | null;
  /** A sentence about what the run waits for; null if it waits for nothing. */
  waiting: string | null;
  /** Events in all; the newest of them are sent. */
  event_count: number;
  /** Seconds since 1970 since when the site's figures are delayed; null if they are current. */
  delayed_since: number | null;
}

/** Those values of a run that changed; the others are absent. */
export interface RunChanges {
  id?: string;
  name?: string;
  status?: RunStatus;
  /** Tokens in the ledger: the median over people of what their machines have. */
  tokens?: number;
  /** People who vouch for that number. */
  people?: number;
  /** Tokens after which the training ends. */
  budget?: number;
  /** Tokens per second over all machines that report, bounded by what other people saw. */
  rate?: number;
  /** Seconds since 1970; null until the training starts. */
  started?: number | null;
  /** Seconds since 1970; null until the run is finished or cancelled. */
  ended?: number | null;
  /** Updates that all machines have published. */
  updates?: number;
  /** Machines that have trained, or that are here to train. */
  workers_known?: number;
  /** The people whose machines these are. */
  people_known?: number;
  /** Those of them that report. */
  workers_alive?: number;
  /** Nats per token over the last section of the curve, a median over people; null before any. */
  training_loss?: number | null;
  /** The last one, in nats per token, a median over people; null before the first. */
  validation_loss?: number | null;
  /** The share of the run's tasks that its last weights answered; null before an evaluation. */
  score?: number | null;
  /** People who confirm the final weights; 0 until they are confirmed. */
  confirmed_by?: number;
  /** The figures in the page's head, in their order. */
  tiles?: HeadTile[];
  /** The parts of the page below its head. */
  cards?: Card[];
  /** A sentence about how the run stands. */
  notice?: string;
  /** Whether figures can still change. */
  is_live?: boolean;
  /** Whether machines with the same updates have the same weights; null if unknown. */
  agree?: boolean | null;
  /** A sentence about what the run waits for; null if it waits for nothing. */
  waiting?: string | null;
  /** Events in all; the newest of them are sent. */
  event_count?: number;
  /** Seconds since 1970 since when the site's figures are delayed; null if they are current. */
  delayed_since?: number | null;
}

/** Something that happened in a run: "who what". Both are plain text that others wrote. */
export interface RunEvent {
  id: string;
  /** Seconds since 1970. */
  at: number;
  kind: "run" | "machine" | "weights" | "checkpoint";
  who: string;
  what: string;
}

/** A run's place in its life cycle. The coordinator decides it; workers obey. */
export type RunStatus = "draft" | "recruiting" | "training" | "paused" | "finished" | "cancelled";

/** Everything that the page shows of a run. It includes all deltas up to its number. */
export interface Snapshot {
  type: "snapshot";
  /** The number of the last delta that it includes. */
  seq: number;
  /** The name of the mirror that sent it. */
  mirror: string;
  /** The mirror's clock, in seconds since 1970. */
  now: number;
  run: Run;
  workers: Machine[];
  /** By the machine's id. */
  plans: Record<string, PlanView>;
  /** The newest first. */
  events: RunEvent[];
  /** [tokens, nats per token], ascending. */
  train: Point[];
  /** [tokens, nats per token], ascending. */
  validation: Point[];
  /** [tokens, seconds since 1970], ascending: when the training reached so many tokens. */
  clock: Point[];
  /** [tokens, learning rate], ascending. */
  learning_rate: Point[];
  /** [tokens, L2 norm before clipping], ascending. */
  gradient_norm: Point[];
  /** [seconds since 1970, tokens per second], ascending. */
  rate: Point[];
  /** [seconds since 1970, machines that report], ascending. */
  machines: Point[];
  /** [seconds since 1970, bytes per second between machines], ascending. */
  sent: Point[];
  /** [seconds since 1970, bytes per second between machines], ascending. */
  received: Point[];
  /** [seconds since 1970, updates that a machine's peers have and it lacks: the mean]. */
  staleness: Point[];
}

/** The machines of a run and their connections, the oldest machines first. */
export interface Swarm {
  nodes: SwarmNode[];
  links: SwarmLink[];
  /** Machines that report and are left out. */
  hidden: number;
}

/** A connection between two machines. Rates are bytes per second now. */
export interface SwarmLink {
  source: string;
  target: string;
  /** From source to target. */
  forward: number;
  backward: number;
  /** Whether both have the same weights; null before they were compared. */
  agrees: boolean | null;
  /** Whether a relay server is in between; null if unknown. */
  relayed: boolean | null;
}

/** A machine that reports, in the graph of the swarm. */
export interface SwarmNode {
  id: string;
  name: string;
  person: string;
  /** Tokens per second. */
  rate: number;
  agrees: boolean | null;
}

/** The training losses and the speed that one machine measured. */
export interface WorkerCurve {
  id: string;
  name: string;
  /** [tokens, nats per token], ascending. */
  points: Point[];
  /** [seconds since 1970, tokens per second], ascending. */
  rates: Point[];
}

/** The curves of those machines that trained most, these first. */
export interface WorkerCurves {
  machines: WorkerCurve[];
}
