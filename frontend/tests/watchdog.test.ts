import { afterEach, beforeEach, expect, test, vi } from "vitest";
import { Watchdog, type Clock } from "../src/watchdog";

const DELAY_MS = 1_000;

let expiries: number[];
let timersSet: number;
let watchdog: Watchdog;

const clock: Clock = {
  now: () => Date.now(),
  setTimer(milliseconds, callback) {
    timersSet += 1;
    return setTimeout(callback, milliseconds) as unknown as number;
  },
  clearTimer: (timer) => clearTimeout(timer),
};

beforeEach(() => {
  vi.useFakeTimers({ now: 0 });
  expiries = [];
  timersSet = 0;
  watchdog = new Watchdog(clock, DELAY_MS, () => expiries.push(Date.now()));
});

afterEach(() => {
  vi.useRealTimers();
});

test("a watchdog that is never started does not expire", () => {
  vi.advanceTimersByTime(10 * DELAY_MS);
  expect(expiries).toEqual([]);
});

test("it expires once, exactly its delay after the last restart", () => {
  for (const pause of [0, 300, 999, 500]) {
    vi.advanceTimersByTime(pause);
    watchdog.restart();
  }
  expect(watchdog.isRunning).toBe(true);
  vi.advanceTimersByTime(10 * DELAY_MS);
  expect(expiries).toEqual([300 + 999 + 500 + DELAY_MS]);
  expect(watchdog.isRunning).toBe(false);
});

test("restarts set no timer while one runs", () => {
  for (let restarts = 0; restarts < 100; restarts++) {
    watchdog.restart();
    vi.advanceTimersByTime(100);
  }
  expect(expiries).toEqual([]);
  expect(timersSet).toBeLessThan(15);
});

test("a cancelled watchdog does not expire, and can be restarted", () => {
  watchdog.restart();
  vi.advanceTimersByTime(DELAY_MS - 1);
  watchdog.cancel();
  expect(watchdog.isRunning).toBe(false);
  vi.advanceTimersByTime(DELAY_MS);
  expect(expiries).toEqual([]);
  watchdog.restart();
  vi.advanceTimersByTime(DELAY_MS);
  expect(expiries).toEqual([3 * DELAY_MS - 1]);
});

test("it can be restarted when it expires", () => {
  const repeating: Watchdog = new Watchdog(clock, DELAY_MS, () => {
    expiries.push(Date.now());
    if (expiries.length < 3) repeating.restart();
  });
  repeating.restart();
  vi.advanceTimersByTime(10 * DELAY_MS);
  expect(expiries).toEqual([DELAY_MS, 2 * DELAY_MS, 3 * DELAY_MS]);
});
