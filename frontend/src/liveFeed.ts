// What keeps a run's page up to date: deltas arrive over a connection to a mirror (liveSocket.ts),
// and a snapshot is fetched at the start and after each gap.
//
// The snapshot is fetched once the socket is open, so that no delta falls between the two. While
// the page's own mirror does not answer, the feed uses another one (see failover.ts) and returns
// later. Sockets, requests, timers and random numbers are passed in as an `Environment`, so that
// tests run without a network.

import { MirrorSelector, type Mirror } from "./failover";
import { LiveSocket, type Socket, type SocketEnvironment } from "./liveSocket";
import { openMessageBatches } from "./messageBatches";
import type { Store } from "./store";
import type { Delta, Snapshot } from "./types";

/** "silent": connected, and nothing has arrived for `LATE_MS`. */
export type ConnectionStatus = "connecting" | "live" | "silent" | "reconnecting" | "refused";

/** What the feed needs from its surroundings. Mirrors are indices; 0 is the page's own. */
export interface Environment extends SocketEnvironment {
  /** Rejects with a RefusedError if a retry cannot succeed. */
  fetchSnapshot(mirror: number): Promise<Snapshot>;
  /** Returns a number in [0, 1). */
  random(): number;
}

/** The mirror does not let this reader see the run, or does not have it. */
export class RefusedError extends Error {}

// The site sends a delta every 3 s at least. Without one for `LATE_MS` the page says that its
// figures are delayed.
export const LATE_MS = 4_500;
export const GAP_WAIT_MS = 1_500; // for a late delta to arrive before a snapshot is fetched
const SNAPSHOT_TIMEOUT_MS = 15_000; // a mirror that takes longer counts as unavailable
const REFUSED_STATUS_CODES = new Set([403, 404]);

type TimerName = "retry" | "gap" | "homeCheck";

/** Keeps the store up to date with a run. */
export class LiveFeed {
  status: ConnectionStatus = "connecting";
  private socket: LiveSocket | null = null; // null while there is no connection
  private mirror = 0; // the mirror whose deltas the store has; each mirror numbers its own
  private shownMirror = 0; // the mirror that the listener was last called with
  private readonly timers = new Map<TimerName, number>();
  private early: { mirror: number; snapshot: Promise<Snapshot> } | null = null; // requested early
  private lateTimer: number | null = null; // runs on while the connection is made again

  constructor(
    private readonly store: Store,
    private readonly environment: Environment,
    private readonly onStatus: (status: ConnectionStatus, mirror: number) => void = () => {},
    private readonly selector: MirrorSelector = new MirrorSelector(1, () => environment.random()),
  ) {}

  /**
   * Request the first snapshot before the socket is open, and show it as soon as it arrives.
   *
   * Deltas that were sent in between leave a gap in their numbers, which leads to another snapshot.
   */
  prefetch(): void {
    const mirror = this.selector.current;
    const snapshot = this.environment.fetchSnapshot(mirror);
    this.early = { mirror, snapshot };
    snapshot.then(
      (early) => {
        if (this.store.run === null) this.store.applySnapshot(early);
      },
      () => {}, // the connection fails for the same reason, and handles it
    );
  }

  /** Connect to the selected mirror; an existing connection is closed. */
  start(): void {
    this.disconnect();
    if (this.mirror !== this.selector.current) this.store.expectOtherMirror();
    this.mirror = this.selector.current;
    const socket: LiveSocket = new LiveSocket(this.environment, this.mirror, {
      onOpen: () => void this.loadSnapshot(socket),
      onMessages: (texts) => this.receiveMessages(socket, texts),
      onLost: () => this.retry(),
      onRefused: () => this.handleRefusal(),
    });
    this.socket = socket;
    if (this.lateTimer === null && !this.store.isSilent) this.restartLateTimer();
  }

  /** Receive messages together if the page draws so seldom; see `LiveSocket.followPace`. */
  followPace(interval: number): void {
    this.socket?.followPace(interval, this.status === "live");
  }

  /** Retry at once if a retry is scheduled: the network is back, or the page is visible again. */
  retryNow(): void {
    if (this.timers.has("retry")) this.start();
  }

  /** Close the connection and cancel all timers. */
  stop(): void {
    this.disconnect();
    this.cancelLateTimer();
  }

  /** Whether this connection has not been replaced by another one. */
  private isCurrent(socket: LiveSocket): boolean {
    return this.socket === socket;
  }

  private receiveMessages(socket: LiveSocket, texts: string[]): void {
    const messages = texts.map((text) => JSON.parse(text) as Delta);
    const deltas = messages.filter((message) => message.type === "delta");
    if (!deltas.length) return;
    const outcome = this.store.applyDeltas(deltas);
    if (outcome === "applied") this.markCurrent();
    this.updateGapTimer(socket, outcome === "gap");
  }

  /** Fetch a snapshot for this connection; ignore it if the connection was lost in the meantime. */
  private async loadSnapshot(socket: LiveSocket): Promise<void> {
    try {
      const snapshot = await this.fetchSnapshot();
      if (!this.isCurrent(socket)) return;
      const outcome = this.store.applySnapshot(snapshot);
      this.selector.markSuccess();
      this.setStatus("live");
      if (outcome !== "stale") this.markCurrent();
      if (!this.selector.isHome && !this.timers.has("homeCheck")) this.scheduleHomeCheck(socket);
      this.updateGapTimer(socket, outcome === "gap");
    } catch (error) {
      if (!this.isCurrent(socket)) return;
      if (error instanceof RefusedError) this.handleRefusal();
      else this.retry();
    }
  }

  private fetchSnapshot(): Promise<Snapshot> {
    const early = this.early;
    this.early = null;
    if (early?.mirror === this.mirror) return early.snapshot;
    return this.environment.fetchSnapshot(this.mirror);
  }

  /** Check later whether the page's own mirror answers again, and return to it then. */
  private scheduleHomeCheck(socket: LiveSocket): void {
    this.startTimer("homeCheck", this.selector.homeCheckDelay(), () => {
      this.environment.fetchSnapshot(0).then(
        () => {
          if (!this.isCurrent(socket)) return;
          this.selector.returnHome();
          this.start();
        },
        () => {
          if (this.isCurrent(socket)) this.scheduleHomeCheck(socket);
        },
      );
    });
  }

  /** While deltas are missing, wait a moment for late ones, and then fetch a snapshot. */
  private updateGapTimer(socket: LiveSocket, hasGap: boolean): void {
    if (!hasGap) {
      this.cancelTimer("gap");
      return;
    }
    if (this.timers.has("gap") || this.store.run === null) return;
    const wait = GAP_WAIT_MS * (0.5 + this.environment.random());
    this.startTimer("gap", wait, () => void this.loadSnapshot(socket));
  }

  private retry(): void {
    this.disconnect();
    this.setStatus("reconnecting");
    this.startTimer("retry", this.selector.markFailed(), () => this.start());
  }

  /**
   * Stop if the page's own mirror refuses.
   *
   * Another mirror may not have the run yet; after its refusal the feed tries the next one.
   */
  private handleRefusal(): void {
    if (!this.selector.isHome) {
      this.retry();
      return;
    }
    this.disconnect();
    this.setStatus("refused");
  }

  /** The store has everything that the site has sent, so it is current for now. */
  private markCurrent(): void {
    this.restartLateTimer();
    this.store.setSilent(false);
    if (this.status === "silent") this.setStatus("live");
  }

  private restartLateTimer(): void {
    this.cancelLateTimer();
    const wait = LATE_MS + (this.socket?.interval ?? 0);
    this.lateTimer = this.environment.setTimer(wait, () => {
      this.lateTimer = null;
      this.store.setSilent(true);
      if (this.status === "live") this.setStatus("silent");
    });
  }

  private cancelLateTimer(): void {
    if (this.lateTimer !== null) this.environment.clearTimer(this.lateTimer);
    this.lateTimer = null;
  }

  private disconnect(): void {
    for (const name of [...this.timers.keys()]) this.cancelTimer(name);
    this.socket?.close();
    this.socket = null;
  }

  private startTimer(name: TimerName, milliseconds: number, callback: () => void): void {
    const timer = this.environment.setTimer(milliseconds, () => {
      this.timers.delete(name);
      callback();
    });
    this.timers.set(name, timer);
  }

  private cancelTimer(name: TimerName): void {
    const timer = this.timers.get(name);
    if (timer !== undefined) this.environment.clearTimer(timer);
    this.timers.delete(name);
  }

  private setStatus(status: ConnectionStatus): void {
    if (status === this.status && this.mirror === this.shownMirror) return;
    this.status = status;
    this.shownMirror = this.mirror;
    this.onStatus(status, this.mirror);
  }
}

/** Create the environment of a real page: WebSocket, fetch, timers and random numbers. */
export function createBrowserEnvironment(runId: string, mirrors: Mirror[]): Environment {
  const socketAddress = (mirror: number): URL => {
    const address = new URL(`${mirrors[mirror]!.base}/ws/runs/${runId}/`, location.href);
    address.protocol = address.protocol === "https:" ? "wss:" : "ws:";
    return address;
  };
  return {
    openSocket: (mirror) => new WebSocket(socketAddress(mirror)) as unknown as Socket,
    ...("Worker" in window && {
      openBatches: (interval: number) => openMessageBatches(socketAddress(0), interval),
    }),
    async fetchSnapshot(mirror) {
      const { base } = mirrors[mirror]!;
      // The page preloads the first snapshot. The browser uses that for a request like its own,
      // without other headers; the site forbids to store answers.
      const response = await fetch(`${base}/live/${runId}/`, {
        credentials: base ? "omit" : "same-origin",
        signal: AbortSignal.timeout(SNAPSHOT_TIMEOUT_MS),
      });
      if (REFUSED_STATUS_CODES.has(response.status)) throw new RefusedError(response.statusText);
      if (!response.ok) throw new Error(`the site answered ${response.status}`);
      return (await response.json()) as Snapshot;
    },
    setTimer: (milliseconds, callback) => window.setTimeout(callback, milliseconds),
    clearTimer: (timer) => window.clearTimeout(timer),
    random: Math.random,
  };
}
