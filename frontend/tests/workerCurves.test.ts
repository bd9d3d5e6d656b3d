import { describe, expect, test } from "vitest";
import { Store } from "../src/store";
import type { WorkerCurve } from "../src/types";
import { lineStyle } from "../src/views/lineStyles";
import { WorkerCurveLoader, type CurveEnvironment } from "../src/workerCurves";

/** Requests that the test answers, and timers that it fires. */
class FakeEnvironment implements CurveEnvironment {
  requests: { resolve: (curves: WorkerCurve[]) => void; reject: (error: Error) => void }[] = [];
  timers = new Map<number, () => void>();
  private nextTimer = 1;

  fetchCurves(): Promise<WorkerCurve[]> {
    return new Promise((resolve, reject) => this.requests.push({ resolve, reject }));
  }

  setTimer(_milliseconds: number, callback: () => void): number {
    this.timers.set(this.nextTimer, callback);
    return this.nextTimer++;
  }

  clearTimer(timer: number): void {
    this.timers.delete(timer);
  }

  fireTimers(): void {
    const callbacks = [...this.timers.values()];
    this.timers.clear();
    for (const callback of callbacks) callback();
  }
}

const CURVE: WorkerCurve = { id: "a", name: "barn", points: [[1, 5]], rates: [] };

/** Wait until resolved promises have called back. */
const settle = () => new Promise((resolve) => setTimeout(resolve));

function createLoader() {
  const store = new Store();
  const environment = new FakeEnvironment();
  return { store, environment, loader: new WorkerCurveLoader(store, environment) };
}

describe("WorkerCurveLoader", () => {
  test("fetches curves only while enabled, and then repeatedly", async () => {
    const { store, environment, loader } = createLoader();
    loader.setEnabled(false);
    expect(environment.requests).toHaveLength(0);
    loader.setEnabled(true);
    loader.setEnabled(true);
    environment.requests[0]!.resolve([CURVE]);
    await settle();
    expect(store.workerCurves).toEqual([CURVE]);
    environment.fireTimers();
    expect(environment.requests).toHaveLength(2);
  });

  test("after a failed request keeps the curves and schedules the next request", async () => {
    const { store, environment, loader } = createLoader();
    loader.setEnabled(true);
    environment.requests[0]!.resolve([CURVE]);
    await settle();
    environment.fireTimers();
    environment.requests[1]!.reject(new Error("gone"));
    await settle();
    expect(store.workerCurves).toEqual([CURVE]);
    expect(environment.timers.size).toBe(1);
  });

  test("disabled during a request ignores the response", async () => {
    const { store, environment, loader } = createLoader();
    loader.setEnabled(true);
    loader.setEnabled(false);
    environment.requests[0]!.resolve([CURVE]);
    await settle();
    expect(store.workerCurves).toEqual([]);
    expect(environment.timers.size).toBe(0);
  });

  test("enabled again during a request has one timer", async () => {
    const { environment, loader } = createLoader();
    loader.setEnabled(true);
    loader.setEnabled(false);
    environment.requests[0]!.resolve([CURVE]);
    await settle();
    loader.setEnabled(true);
    loader.setEnabled(false);
    loader.setEnabled(true);
    for (const request of environment.requests) request.resolve([CURVE]);
    await settle();
    expect(environment.timers.size).toBe(1);
  });
});

test("lineStyle gives twelve curves distinct styles", () => {
  const styles = Array.from({ length: 12 }, (_, i) => JSON.stringify(lineStyle(i)));
  expect(new Set(styles).size).toBe(12);
});
