// A site in memory, for tests of connections and feeds.

import type { Environment } from "../src/liveFeed";
import type { Socket } from "../src/liveSocket";
import type { MessageBatches } from "../src/messageBatches";
import type { Delta, Snapshot } from "../src/types";

export const CONNECTION_LOST = 1006;
export const FORBIDDEN = 4403;
export const NOT_FOUND = 4404;

export interface FakeSocket extends Socket {
  mirror: number;
  closed: boolean;
}

export interface FakeBatches extends MessageBatches {
  interval: number;
  closed: boolean;
}

export interface SnapshotRequest {
  mirror: number;
  resolve: (snapshot: Snapshot) => void;
  reject: (error: Error) => void;
}

/** A site in memory: its sockets, its snapshot requests, and a clock that the test moves. */
export class FakeSite implements Environment {
  sockets: FakeSocket[] = [];
  batches: FakeBatches[] = [];
  requests: SnapshotRequest[] = [];
  now = 0;
  private readonly timers = new Map<number, { at: number; callback: () => void }>();
  private nextTimer = 1;

  openSocket(mirror: number): Socket {
    const socket: FakeSocket = {
      mirror,
      closed: false,
      onopen: null,
      onmessage: null,
      onclose: null,
      close() {
        this.closed = true;
      },
    };
    this.sockets.push(socket);
    return socket;
  }

  openBatches(interval: number): MessageBatches {
    const batches: FakeBatches = {
      interval,
      closed: false,
      onbatch: null,
      onclose: null,
      setInterval(milliseconds) {
        this.interval = milliseconds;
      },
      close() {
        this.closed = true;
      },
    };
    this.batches.push(batches);
    return batches;
  }

  fetchSnapshot(mirror: number): Promise<Snapshot> {
    return new Promise((resolve, reject) => this.requests.push({ mirror, resolve, reject }));
  }

  setTimer(milliseconds: number, callback: () => void): number {
    this.timers.set(this.nextTimer, { at: this.now + milliseconds, callback });
    return this.nextTimer++;
  }

  clearTimer(timer: number): void {
    this.timers.delete(timer);
  }

  random(): number {
    return 0.5;
  }

  get lastSocket(): FakeSocket {
    return this.sockets.at(-1)!;
  }

  get lastRequest(): SnapshotRequest {
    return this.requests.at(-1)!;
  }

  acceptConnection(): void {
    this.lastSocket.onopen?.();
  }

  closeConnection(code = CONNECTION_LOST): void {
    this.lastSocket.onclose?.({ code });
  }

  sendDelta(delta: Delta): void {
    this.lastSocket.onmessage?.({ data: JSON.stringify(delta) });
  }

  async answerSnapshot(snapshot: Snapshot): Promise<void> {
    this.lastRequest.resolve(snapshot);
    await waitForCallbacks();
  }

  async failSnapshot(error: Error): Promise<void> {
    this.lastRequest.reject(error);
    await waitForCallbacks();
  }

  advanceTime(milliseconds: number): void {
    this.now += milliseconds;
    for (const [id, timer] of [...this.timers].sort((a, b) => a[1].at - b[1].at)) {
      if (timer.at > this.now) continue;
      // A callback that ran before may have cancelled this timer.
      if (this.timers.delete(id)) timer.callback();
    }
  }
}

/** Wait until resolved promises have called back. */
export const waitForCallbacks = () => new Promise((resolve) => setTimeout(resolve, 0));
