// A timer that is restarted often, such as with each message of a connection. Pure: the clock and
// the timers are passed in.

/** What a watchdog needs from its surroundings; all times are in milliseconds. */
export interface Clock {
  now(): number;
  setTimer(milliseconds: number, callback: () => void): number;
  clearTimer(timer: number): void;
}

/**
 * Calls back once nothing has restarted it for a while.
 *
 * A restart only moves the deadline. The browser's timer stays, and waits for the rest of the time
 * when it fires. To cancel and set a timer with each message would cost a slow device time.
 */
export class Watchdog {
  private timer: number | null = null;
  private deadline = 0;

  /** Wait for `restart`; then call `onExpiry` when `delay` milliseconds pass without another. */
  constructor(
    private readonly clock: Clock,
    private readonly delay: number,
    private readonly onExpiry: () => void,
  ) {}

  /** Whether it has been restarted since it expired or was cancelled. */
  get isRunning(): boolean {
    return this.timer !== null;
  }

  /** Move the deadline to the full delay from now. */
  restart(): void {
    this.deadline = this.clock.now() + this.delay;
    if (this.timer === null) this.startTimer(this.delay);
  }

  /** Do not call back until the next restart. */
  cancel(): void {
    if (this.timer !== null) this.clock.clearTimer(this.timer);
    this.timer = null;
  }

  private startTimer(milliseconds: number): void {
    this.timer = this.clock.setTimer(milliseconds, () => {
      this.timer = null;
      const rest = this.deadline - this.clock.now();
      if (rest > 0) this.startTimer(rest);
      else this.onExpiry();
    });
  }
}
