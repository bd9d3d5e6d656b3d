// Keeps the store fed: the websocket for deltas, a snapshot whenever it starts or misses one, and patience in between.
// While its own mirror does not answer it goes on at another (see mirrors.ts), and comes back.
//
// The socket opens first and the snapshot is fetched once it is open, so that no delta falls between the two. Everything
// from outside (websocket, fetch, clock, chance) is handed in, which is how the tests run it without a network.

import { Choice, type Mirror } from "./mirrors";
import type { Store } from "./store";
import type { Delta, Snapshot } from "./types";

export type Link = "connecting" | "live" | "reconnecting" | "refused";

export interface Wire {
  onopen: (() => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event: { code: number }) => void) | null;
  close(): void;
}

/** Mirrors by number; 0 is the page's own. */
export interface Outside {
  open(mirror: number): Wire;
  /** Rejects with a Refusal when asking again is of no use. */
  snapshot(mirror: number): Promise<Snapshot>;
  later(milliseconds: number, run: () => void): number;
  cancel(timer: number): void;
  /** In [0, 1). */
  chance(): number;
}

export class Refusal extends Error {}

export const SILENCE = 20_000; // ms without a frame (the site speaks every 5 s at least) before the link counts as dead
export const PATIENCE = 1_500; // ms a late delta gets before a snapshot is fetched instead
const SNAPSHOT_WAIT = 15_000; // a site that takes longer counts as gone
const REFUSED = new Set([4403, 4404]); // close codes that say: not for you, or not there

type Timer = "retry" | "silence" | "gap" | "home";

export class Feed {
  link: Link = "connecting";
  private wire: Wire | null = null;
  private heard = 0; // the mirror whose frames the store has: each numbers its own
  private told = 0;
  private timers = new Map<Timer, number>();

  constructor(
    private readonly store: Store,
    private readonly outside: Outside,
    private readonly tell: (link: Link, mirror: number) => void = () => {},
    private readonly choice: Choice = new Choice(1, () => outside.chance()),
  ) {}

  start(): void {
    this.drop();
    if (this.heard !== this.choice.at) this.store.elsewhere();
    this.heard = this.choice.at;
    const wire = this.outside.open(this.heard);
    this.wire = wire;
    wire.onopen = () => void (this.wire === wire && this.fetch(wire));
    wire.onmessage = (event) => void (this.wire === wire && this.hear(wire, event.data));
    wire.onclose = (event) => void (this.wire === wire && (REFUSED.has(event.code) ? this.refused() : this.retry()));
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
      const frame = await this.outside.snapshot(this.heard);
      if (this.wire !== wire) return;
      const outcome = this.store.snapshot(frame);
      this.choice.answered();
      this.set("live");
      if (!this.choice.home && !this.timers.has("home")) this.lookHome(wire);
      this.settle(wire, outcome === "gap");
    } catch (error) {
      if (this.wire !== wire) return;
      if (error instanceof Refusal) this.refused();
      else this.retry();
    }
  }

  /** Whether the page's own mirror is back: what is shown meanwhile stays. */
  private lookHome(wire: Wire): void {
    this.after("home", this.choice.lookHome(), () => {
      this.outside.snapshot(0).then(
        () => {
          if (this.wire !== wire) return;
          this.choice.goHome();
          this.start();
        },
        () => void (this.wire === wire && this.lookHome(wire)),
      );
    });
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
    this.after("retry", this.choice.failed(), () => this.start());
  }

  /** Of no use here. Another mirror may only not know of the run yet. */
  private refused(): void {
    if (!this.choice.home) return this.retry();
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
    if (link === this.link && this.heard === this.told) return;
    [this.link, this.told] = [link, this.heard];
    this.tell(link, this.heard);
  }
}

/** The browser's own websocket, fetch, clock and chance. */
export function browser(run: string, mirrors: Mirror[]): Outside {
  return {
    open(mirror) {
      const address = new URL(`${mirrors[mirror]!.base}/ws/runs/${run}/`, location.href);
      address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
      return new WebSocket(address) as unknown as Wire;
    },
    async snapshot(mirror) {
      const { base } = mirrors[mirror]!;
      const answer = await fetch(`${base}/live/${run}/`, {
        headers: { Accept: "application/json" },
        cache: "no-store",
        credentials: base ? "omit" : "same-origin",
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
