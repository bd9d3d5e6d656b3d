// The connection of a run's page: deltas over a websocket, and a snapshot at the start and after each gap. While the
// page's own mirror does not answer, the feed uses another one (see failover.ts), and returns later.
//
// The snapshot is fetched once the socket is open, so that no delta falls between the two. The websocket, fetch, the clock
// and random numbers are passed in as an `Environment`, so that tests run without a network.

import { MirrorSelector, type Mirror } from "./failover";
import type { Store } from "./store";
import type { Delta, Snapshot } from "./types";

export type ConnectionStatus = "connecting" | "live" | "reconnecting" | "refused";

export interface Socket {
  onopen: (() => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event: { code: number }) => void) | null;
  close(): void;
}

/** Mirrors by number; 0 is the page's own. */
export interface Environment {
  open(mirror: number): Socket;
  /** Rejects with a RefusedError if a retry cannot succeed. */
  snapshot(mirror: number): Promise<Snapshot>;
  later(milliseconds: number, run: () => void): number;
  cancel(timer: number): void;
  /** In [0, 1). */
  random(): number;
}

export class RefusedError extends Error {}

export const SILENCE_MS = 20_000; // without a delta before the connection counts as lost; the site sends one every 5 s at least
export const GAP_WAIT_MS = 1_500; // for a late delta to arrive before a snapshot is fetched
const SNAPSHOT_TIMEOUT_MS = 15_000; // a site that takes longer counts as unavailable
const CLOSE_CODES_REFUSED = new Set([4403, 4404]); // forbidden, not found

type Timer = "retry" | "silence" | "gap" | "home";

export class LiveFeed {
  status: ConnectionStatus = "connecting";
  private socket: Socket | null = null;
  private mirror = 0; // whose deltas the store has; each mirror numbers its own
  private shownMirror = 0; // the mirror that the listener was last called with
  private timers = new Map<Timer, number>();

  constructor(
    private readonly store: Store,
    private readonly environment: Environment,
    private readonly onStatus: (status: ConnectionStatus, mirror: number) => void = () => {},
    private readonly selector: MirrorSelector = new MirrorSelector(1, () => environment.random()),
  ) {}

  start(): void {
    this.disconnect();
    if (this.mirror !== this.selector.current) this.store.expectOtherMirror();
    this.mirror = this.selector.current;
    const socket = this.environment.open(this.mirror);
    this.socket = socket;
    socket.onopen = () => void (this.socket === socket && this.fetchSnapshot(socket));
    socket.onmessage = (event) => void (this.socket === socket && this.receive(socket, event.data));
    socket.onclose = (event) => {
      if (this.socket !== socket) return;
      if (CLOSE_CODES_REFUSED.has(event.code)) this.stopRefused();
      else this.retry();
    };
    this.restartSilenceTimer();
  }

  /** Retry at once if a retry is scheduled: the network is back, or the page is visible again. */
  retryNow(): void {
    if (this.timers.has("retry")) this.start();
  }

  stop(): void {
    this.disconnect();
  }

  private receive(socket: Socket, text: string): void {
    this.restartSilenceTimer();
    const delta = JSON.parse(text) as Delta;
    if (delta.type === "delta") this.handleGap(socket, this.store.applyDelta(delta) === "gap");
  }

  /** Fetch a snapshot for this connection; ignore it if the connection was lost in the meantime. */
  private async fetchSnapshot(socket: Socket): Promise<void> {
    try {
      const snapshot = await this.environment.snapshot(this.mirror);
      if (this.socket !== socket) return;
      const outcome = this.store.applySnapshot(snapshot);
      this.selector.markSuccess();
      this.setStatus("live");
      if (!this.selector.isHome && !this.timers.has("home")) this.scheduleHomeCheck(socket);
      this.handleGap(socket, outcome === "gap");
    } catch (error) {
      if (this.socket !== socket) return;
      if (error instanceof RefusedError) this.stopRefused();
      else this.retry();
    }
  }

  /** Schedule a check of whether the page's own mirror is back, and return to it then. What is shown stays. */
  private scheduleHomeCheck(socket: Socket): void {
    this.startTimer("home", this.selector.homeCheckDelay(), () => {
      this.environment.snapshot(0).then(
        () => {
          if (this.socket !== socket) return;
          this.selector.returnHome();
          this.start();
        },
        () => void (this.socket === socket && this.scheduleHomeCheck(socket)),
      );
    });
  }

  /** Wait a moment for a delta that was overtaken; if the gap stays, fetch a snapshot. */
  private handleGap(socket: Socket, gap: boolean): void {
    if (!gap) this.cancelTimer("gap");
    else if (!this.timers.has("gap") && this.store.run !== null)
      this.startTimer("gap", GAP_WAIT_MS * (0.5 + this.environment.random()), () => void this.fetchSnapshot(socket));
  }

  private retry(): void {
    this.disconnect();
    this.setStatus("reconnecting");
    this.startTimer("retry", this.selector.markFailed(), () => this.start());
  }

  /** Stop if the page's own mirror refuses. Another mirror may not have the run yet, so try the next one. */
  private stopRefused(): void {
    if (!this.selector.isHome) return this.retry();
    this.disconnect();
    this.setStatus("refused");
  }

  private restartSilenceTimer(): void {
    this.cancelTimer("silence");
    this.startTimer("silence", SILENCE_MS, () => this.retry());
  }

  private disconnect(): void {
    for (const timer of [...this.timers.keys()]) this.cancelTimer(timer);
    const socket = this.socket;
    this.socket = null;
    socket?.close();
  }

  private startTimer(timer: Timer, milliseconds: number, run: () => void): void {
    const id = this.environment.later(milliseconds, () => {
      this.timers.delete(timer);
      run();
    });
    this.timers.set(timer, id);
  }

  private cancelTimer(timer: Timer): void {
    const id = this.timers.get(timer);
    if (id !== undefined) this.environment.cancel(id);
    this.timers.delete(timer);
  }

  private setStatus(status: ConnectionStatus): void {
    if (status === this.status && this.mirror === this.shownMirror) return;
    this.status = status;
    this.shownMirror = this.mirror;
    this.onStatus(status, this.mirror);
  }
}

/** Create an environment from the browser's websocket, fetch, timers and random numbers. */
export function browserEnvironment(run: string, mirrors: Mirror[]): Environment {
  return {
    open(mirror) {
      const address = new URL(`${mirrors[mirror]!.base}/ws/runs/${run}/`, location.href);
      address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
      return new WebSocket(address) as unknown as Socket;
    },
    async snapshot(mirror) {
      const { base } = mirrors[mirror]!;
      const answer = await fetch(`${base}/live/${run}/`, {
        headers: { Accept: "application/json" },
        cache: "no-store",
        credentials: base ? "omit" : "same-origin",
        signal: AbortSignal.timeout(SNAPSHOT_TIMEOUT_MS),
      });
      if (answer.status === 403 || answer.status === 404) throw new RefusedError(answer.statusText);
      if (!answer.ok) throw new Error(`the site answered ${answer.status}`);
      return (await answer.json()) as Snapshot;
    },
    later: (milliseconds, run) => window.setTimeout(run, milliseconds),
    cancel: (timer) => window.clearTimeout(timer),
    random: Math.random,
  };
}
