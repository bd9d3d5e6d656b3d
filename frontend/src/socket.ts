// Keeps the store fed: the websocket for deltas, a snapshot whenever it starts or misses one, and patience in between.
//
// The socket opens first and the snapshot is fetched once it is open, so that no delta falls between the two. Everything
// from outside (websocket, fetch, clock, chance) is handed in, which is how the tests run it without a network.

import type { Store } from "./store";
import type { Delta, Snapshot } from "./types";

export type Link = "connecting" | "live" | "reconnecting" | "refused";

export interface Wire {
  onopen: (() => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event: { code: number }) => void) | null;
  close(): void;
}

export interface Outside {
  open(): Wire;
  /** Rejects with a Refusal when asking again is of no use. */
  snapshot(): Promise<Snapshot>;
  later(milliseconds: number, run: () => void): number;
  cancel(timer: number): void;
  /** In [0, 1). */
  chance(): number;
}

export class Refusal extends Error {}

export const SILENCE = 20_000; // ms without a frame (the site speaks every 5 s at least) before the link counts as dead
export const PATIENCE = 1_500; // ms a late delta gets before a snapshot is fetched instead
const SNAPSHOT_WAIT = 15_000; // a site that takes longer counts as gone
const FIRST_WAIT = 500; // ms, doubling…
const LONGEST_WAIT = 15_000;
const REFUSED = new Set([4403, 4404]); // close codes that say: not for you, or not there

type Timer = "retry" | "silence" | "gap";

export class Feed {
  link: Link = "connecting";
  private wire: Wire | null = null;
  private failures = 0;
  private timers = new Map<Timer, number>();

  constructor(
    private readonly store: Store,
    private readonly outside: Outside,
    private readonly tell: (link: Link) => void = () => {},
  ) {}

  start(): void {
    this.drop();
    const wire = this.outside.open();
    this.wire = wire;
    wire.onopen = () => void (this.wire === wire && this.fetch(wire));
    wire.onmessage = (event) => void (this.wire === wire && this.hear(wire, event.data));
    wire.onclose = (event) => void (this.wire === wire && (REFUSED.has(event.code) ? this.refuse() : this.retry()));
    this.listen();
  }

  /** Now rather than after the wait: the network is back, or somebody looks at the page again. */
  nudge(): void {
    if (this.timers.has("retry")) this.start();
  }

  stop(): void {
    this.drop();
  }

  private hear(wire: Wire, text: string): void {
    this.listen();
    const frame = JSON.parse(text) as Delta;
    if (frame.type === "delta") this.settle(wire, this.store.delta(frame) === "gap");
  }

  /** A snapshot for this very connection: one that arrives after it broke is of no use. */
  private async fetch(wire: Wire): Promise<void> {
    try {
      const frame = await this.outside.snapshot();
      if (this.wire !== wire) return;
      const outcome = this.store.snapshot(frame);
      this.failures = 0;
      this.set("live");
      this.settle(wire, outcome === "gap");
    } catch (error) {
      if (this.wire !== wire) return;
      if (error instanceof Refusal) this.refuse();
      else this.retry();
    }
  }

  /** A gap is given a moment to close by itself (a delta that was overtaken), then a snapshot closes it. */
  private settle(wire: Wire, gap: boolean): void {
    if (!gap) this.forget("gap");
    else if (!this.timers.has("gap") && this.store.run !== null)
      this.after("gap", PATIENCE * (0.5 + this.outside.chance()), () => void this.fetch(wire));
  }

  private retry(): void {
    this.drop();
    this.set("reconnecting");
    const wait = Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** this.failures++);
    this.after("retry", wait * (0.5 + this.outside.chance()), () => this.start());
  }

  private refuse(): void {
    this.drop();
    this.set("refused");
  }

  private listen(): void {
    this.forget("silence");
    this.after("silence", SILENCE, () => this.retry());
  }

  private drop(): void {
    for (const timer of [...this.timers.keys()]) this.forget(timer);
    const wire = this.wire;
    this.wire = null;
    wire?.close();
  }

  private after(timer: Timer, milliseconds: number, run: () => void): void {
    const id = this.outside.later(milliseconds, () => {
      this.timers.delete(timer);
      run();
    });
    this.timers.set(timer, id);
  }

  private forget(timer: Timer): void {
    const id = this.timers.get(timer);
    if (id !== undefined) this.outside.cancel(id);
    this.timers.delete(timer);
  }

  private set(link: Link): void {
    if (link === this.link) return;
    this.link = link;
    this.tell(link);
  }
}

/** The browser's own websocket, fetch, clock and chance. */
export function browser(run: string): Outside {
  const address = new URL(`/ws/runs/${run}/`, location.href);
  address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  return {
    open: () => new WebSocket(address) as unknown as Wire,
    async snapshot() {
      const answer = await fetch(`/live/${run}/`, {
        headers: { Accept: "application/json" },
        cache: "no-store",
        signal: AbortSignal.timeout(SNAPSHOT_WAIT),
      });
      if (answer.status === 403 || answer.status === 404) throw new Refusal(answer.statusText);
      if (!answer.ok) throw new Error(`the site answered ${answer.status}`);
      return (await answer.json()) as Snapshot;
    },
    later: (milliseconds, run) => window.setTimeout(run, milliseconds),
    cancel: (timer) => window.clearTimeout(timer),
    chance: Math.random,
  };
}
