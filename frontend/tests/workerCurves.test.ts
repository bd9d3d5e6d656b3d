import { expect, test } from "vitest";
import { WorkerCurveLoader, type CurveEnvironment } from "../src/workerCurves";
import { Store } from "../src/store";
import type { WorkerCurve } from "../src/types";
import { lineStyle } from "../src/views/lineStyles";

/** A site and a clock that the test controls. */
class Environment implements CurveEnvironment {
  requests: { resolve: (lines: WorkerCurve[]) => void; reject: (error: Error) => void }[] = [];
  timers = new Map<number, () => void>();
  private next = 1;

  fetch(): Promise<WorkerCurve[]> {
    return new Promise((resolve, reject) => this.requests.push({ resolve, reject }));
  }

  later(_milliseconds: number, run: () => void): number {
    this.timers.set(this.next, run);
    return this.next++;
  }

  cancel(timer: number): void {
    this.timers.delete(timer);
  }

  strike(): void {
    const due = [...this.timers.values()];
    this.timers.clear();
    for (const run of due) run();
  }
}

const BARN: WorkerCurve = { id: "a", name: "barn", points: [[1, 5]] };
const settled = () => new Promise((resolve) => setTimeout(resolve));

function feed(): { store: Store; outside: Environment; lines: WorkerCurveLoader } {
  const [store, outside] = [new Store(), new Environment()];
  return { store, outside, lines: new WorkerCurveLoader(store, outside) };
}

test("curves are fetched only while enabled, and then repeatedly", async () => {
  const { store, outside, lines } = feed();
  lines.setEnabled(false);
  expect(outside.requests).toHaveLength(0);
  lines.setEnabled(true);
  lines.setEnabled(true);
  outside.requests[0]!.resolve([BARN]);
  await settled();
  expect(store.curves).toEqual([BARN]);
  outside.strike();
  expect(outside.requests).toHaveLength(2);
});

test("after a failed request the curves stay and the next request is scheduled", async () => {
  const { store, outside, lines } = feed();
  lines.setEnabled(true);
  outside.requests[0]!.resolve([BARN]);
  await settled();
  outside.strike();
  outside.requests[1]!.reject(new Error("gone"));
  await settled();
  expect(store.curves).toEqual([BARN]);
  expect(outside.timers.size).toBe(1);
});

test("a response after disabling is ignored, and re-enabling leaves one timer", async () => {
  const { store, outside, lines } = feed();
  lines.setEnabled(true);
  lines.setEnabled(false);
  outside.requests[0]!.resolve([BARN]);
  await settled();
  expect(store.curves).toEqual([]);
  expect(outside.timers.size).toBe(0);
  lines.setEnabled(true);
  lines.setEnabled(false);
  lines.setEnabled(true);
  for (const each of outside.requests) each.resolve([BARN]);
  await settled();
  expect(outside.timers.size).toBe(1);
});

test("a dozen curves have distinct line styles", () => {
  const seen = Array.from({ length: 12 }, (_, i) => JSON.stringify(lineStyle(i)));
  expect(new Set(seen).size).toBe(12);
});
