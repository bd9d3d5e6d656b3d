// One connection of a run's page to a mirror: a websocket that delivers the texts of messages.
//
// A slow device receives the messages of some seconds together (`followPace`): a web worker opens a
// second socket, which replaces the first one when it has delivered. Messages that both have
// delivered arrive twice.

import type { MessageBatches } from "./messageBatches";

/** The part of a WebSocket that is used here. */
export interface Socket {
  onopen: (() => void) | null;
  onmessage: ((event: { data: string }) => void) | null;
  onclose: ((event: { code: number }) => void) | null;
  close(): void;
}

/** What a connection needs from its surroundings. Mirrors are indices; 0 is the page's own. */
export interface SocketEnvironment {
  openSocket(mirror: number): Socket;
  /**
   * Connect to the page's own mirror, and receive what has arrived every `interval` milliseconds.
   * Absent where there are no web workers.
   */
  openBatches?(interval: number): MessageBatches;
  setTimer(milliseconds: number, callback: () => void): number;
  clearTimer(timer: number): void;
}

/** What a connection calls. After `close`, and after "lost" or "refused", it calls nothing. */
export interface SocketListener {
  onOpen(): void;
  onMessages(texts: string[]): void;
  /** The connection is closed, or has been silent for `SILENCE_MS`. */
  onLost(): void;
  /** The mirror does not let this reader see the run, or does not have it. */
  onRefused(): void;
}

export const SILENCE_MS = 20_000; // without a message until the connection counts as lost
export const BATCH_MS = 2_000; // between two drawings from which on messages arrive together
const REFUSED_CLOSE_CODES = new Set([4403, 4404]); // forbidden, not found

/** A connection from its opening to its end; a lost one is replaced by another object. */
export class LiveSocket {
  private readonly socket: Socket;
  private batches: MessageBatches | null = null;
  private hasBatches = false; // whether the batches have replaced the socket
  private canBatch = true; // until the worker has failed
  private batchInterval = 0; // milliseconds
  private silenceTimer: number | null = null;

  /** Connect to a mirror. */
  constructor(
    private readonly environment: SocketEnvironment,
    private readonly mirror: number,
    private readonly listener: SocketListener,
  ) {
    this.socket = environment.openSocket(mirror);
    this.socket.onopen = () => listener.onOpen();
    this.socket.onmessage = (event) => this.receive([event.data]);
    this.socket.onclose = (event) => {
      this.close();
      if (REFUSED_CLOSE_CODES.has(event.code)) listener.onRefused();
      else listener.onLost();
    };
    this.restartSilenceTimer();
  }

  /** Milliseconds between two deliveries; 0 if each message arrives alone. */
  get interval(): number {
    return this.hasBatches ? this.batchInterval : 0;
  }

  /**
   * Receive messages together if the page draws so seldom, every so many milliseconds.
   *
   * Nothing changes while this is a connection to another mirror than the page's own, or if the
   * worker that collects the messages fails.
   *
   * @param interval - milliseconds between two drawings of the page
   * @param isLive - whether messages arrive, so that a second socket may be opened
   */
  followPace(interval: number, isLive: boolean): void {
    if (this.batches) {
      if (interval !== this.batchInterval) this.batches.setInterval(interval);
      this.batchInterval = interval;
      return;
    }
    if (!isLive || interval < BATCH_MS || this.mirror !== 0 || !this.canBatch) return;
    const batches = this.environment.openBatches?.(interval);
    if (!batches) return;
    this.batches = batches;
    this.batchInterval = interval;
    batches.onbatch = (texts) => {
      if (!this.hasBatches) this.replaceSocket();
      this.receive(texts);
    };
    batches.onclose = () => this.loseBatches();
  }

  /** Close the connection. */
  close(): void {
    this.cancelSilenceTimer();
    this.closeSocket();
    this.closeBatches();
  }

  private receive(texts: string[]): void {
    this.restartSilenceTimer();
    this.listener.onMessages(texts);
  }

  private replaceSocket(): void {
    this.hasBatches = true;
    this.closeSocket();
  }

  /** Use the socket if the batches have not replaced it yet. */
  private loseBatches(): void {
    if (!this.hasBatches) {
      this.closeBatches();
      this.canBatch = false;
      return;
    }
    this.close();
    this.listener.onLost();
  }

  private closeSocket(): void {
    this.socket.onopen = this.socket.onmessage = this.socket.onclose = null;
    this.socket.close();
  }

  private closeBatches(): void {
    if (!this.batches) return;
    this.batches.onbatch = this.batches.onclose = null;
    this.batches.close();
    this.batches = null;
  }

  private restartSilenceTimer(): void {
    this.cancelSilenceTimer();
    this.silenceTimer = this.environment.setTimer(SILENCE_MS, () => {
      this.close();
      this.listener.onLost();
    });
  }

  private cancelSilenceTimer(): void {
    if (this.silenceTimer !== null) this.environment.clearTimer(this.silenceTimer);
    this.silenceTimer = null;
  }
}
