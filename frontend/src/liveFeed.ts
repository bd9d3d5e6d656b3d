// The connection of a run's page to a mirror: deltas arrive over a websocket, and a snapshot is
// fetched at the start and after each gap.
//
// The snapshot is fetched once the socket is open, so that no delta falls between the two. While
// the page's own mirror does not answer, the feed uses another one (see failover.ts) and returns
// later. Sockets, requests, timers and random numbers are passed in as an `Environment`, so that
// tests run without a network.
//
// A slow device receives the deltas of some seconds together (`followPace`): a web worker
// opens a second socket, which replaces the first one when it has delivered.

import { MirrorSelector, type Mirror } from "./failover";
import { openMessageBatches, type MessageBatches } from "./messageBatches";
import type { Store } from "./store";
import type { Delta, Snapshot } from "./types";

/** "silent": connected, and nothing has arrived for `LATE_MS`. */
export type ConnectionStatus = "connecting" | "live" | "silent" | "reconnecting" | "refused";

/** The part of a WebSocket that the feed uses. */
export interface Socket {
  onopen: (() => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event: { code: number }) => void) | null;
  close(): void;
}

type Connection = Socket | MessageBatches;

/** What the feed needs from its surroundings. Mirrors are indices; 0 is the page's own. */
export interface Environment {
  openSocket(mirror: number): Socket;
  /**
   * Connect to the page's own mirror, and receive what has arrived every `interval` milliseconds.
   * Absent where there are no web workers.
   */
  openBatches?(interval: number): MessageBatches;
  /** Rejects with a RefusedError if a retry cannot succeed. */
  fetchSnapshot(mirror: number): Promise<Snapshot>;
  setTimer(milliseconds: number, callback: () => void): number;
  clearTimer(timer: number): void;
  /** Returns a number in [0, 1). */
  random(): number;
}

/** The mirror does not let this reader see the run, or does not have it. */
export class RefusedError extends Error {}

// The site sends a delta every 3 s at least. Without one for `LATE_MS` the page says that its
// figures are delayed, and for `SILENCE_MS` the connection counts as lost.
export const LATE_MS = 4_500;
export const SILENCE_MS = 20_000;
export const GAP_WAIT_MS = 1_500; // for a late delta to arrive before a snapshot is fetched
export const BATCH_MS = 2_000; // between two drawings from which on deltas are received together
const SNAPSHOT_TIMEOUT_MS = 15_000; // a mirror that takes longer counts as unavailable
const REFUSED_CLOSE_CODES = new Set([4403, 4404]); // forbidden, not found
const REFUSED_STATUS_CODES = new Set([403, 404]);

type TimerName = "retry" | "silence" | "gap" | "homeCheck";

/** Keeps the store up to date with a run. */
export class LiveFeed {
  status: ConnectionStatus = "connecting";
  private socket: Connection | null = null;
  private successor: MessageBatches | null = null; // replaces the socket when it has delivered
  private batches: MessageBatches | null = null; // the socket, if its messages arrive together
  private canBatch = true; // until the worker has failed on this connection
  private batchInterval = 0; // milliseconds between two batches; 0 if each message arrives alone
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
    this.canBatch = true;
    if (this.mirror !== this.selector.current) this.store.expectOtherMirror();
    this.mirror = this.selector.current;
    const socket = this.environment.openSocket(this.mirror);
    this.socket = socket;
    socket.onopen = () => {
      if (this.isCurrent(socket)) void this.loadSnapshot(socket);
    };
    socket.onmessage = (event) => {
      if (this.isCurrent(socket)) this.receiveMessages(socket, [event.data]);
    };
    socket.onclose = (event) => {
      if (!this.isCurrent(socket)) return;
      if (REFUSED_CLOSE_CODES.has(event.code)) this.handleRefusal();
      else this.retry();
    };
    this.restartSilenceTimer();
    if (this.lateTimer === null && !this.store.isSilent) this.restartLateTimer();
  }

  /**
   * Receive messages together if the page draws so seldom, every so many milliseconds.
   *
   * Nothing changes while the page has no connection to its own mirror, or if the worker that
   * collects the messages fails.
   */
  followPace(interval: number): void {
    const present = this.successor ?? this.batches;
    if (present) {
      if (interval !== this.batchInterval) present.setInterval(interval);
      this.batchInterval = interval;
      return;
    }
    if (interval < BATCH_MS || this.status !== "live" || this.mirror !== 0) return;
    if (!this.canBatch) return;
    const batches = this.environment.openBatches?.(interval);
    if (!batches) return;
    this.successor = batches;
    this.batchInterval = interval;
    batches.onbatch = (texts) => {
      if (this.successor === batches) this.replaceSocket(batches);
      if (this.isCurrent(batches)) this.receiveMessages(batches, texts);
    };
    batches.onclose = () => {
      if (this.successor === batches) {
        this.closeSuccessor();
        this.canBatch = false;
      } else if (this.isCurrent(batches)) this.retry();
    };
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

  /** Whether events of this socket still count: it has not been replaced by another one. */
  private isCurrent(socket: Connection): boolean {
    return this.socket === socket;
  }

  /** Use the successor instead of the socket. Deltas that both have delivered are applied once. */
  private replaceSocket(batches: MessageBatches): void {
    this.cancelTimer("gap"); // its snapshot would be the old socket's
    this.socket?.close();
    this.socket = this.batches = batches;
    this.successor = null;
  }

  private closeSuccessor(): void {
    this.successor?.close();
    this.successor = null;
  }

  private receiveMessages(socket: Connection, texts: string[]): void {
    this.restartSilenceTimer();
    const messages = texts.map((text) => JSON.parse(text) as Delta);
    const deltas = messages.filter((message) => message.type === "delta");
    if (!deltas.length) return;
    const outcome = this.store.applyDeltas(deltas);
    if (outcome === "applied") this.markCurrent();
    this.updateGapTimer(socket, outcome === "gap");
  }

  /** Fetch a snapshot for this connection; ignore it if the connection was lost in the meantime. */
  private async loadSnapshot(socket: Connection): Promise<void> {
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
  private scheduleHomeCheck(socket: Connection): void {
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
  private updateGapTimer(socket: Connection, hasGap: boolean): void {
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
    const wait = LATE_MS + (this.batches ? this.batchInterval : 0);
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

  private restartSilenceTimer(): void {
    this.cancelTimer("silence");
    this.startTimer("silence", SILENCE_MS, () => this.retry());
  }

  private disconnect(): void {
    for (const name of [...this.timers.keys()]) this.cancelTimer(name);
    this.closeSuccessor();
    const socket = this.socket;
    this.socket = this.batches = null;
    socket?.close();
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
