import { describe, expect, test } from "vitest";
import { Store } from "../src/store";
import { findDelay, summarizeRun } from "../src/views/runNotices";
import { createSnapshot } from "./messages";

const RENDERED_AT = 900;

function createStore(delayedSince: number | null): Store {
  const snapshot = createSnapshot(3);
  const store = new Store();
  store.applySnapshot({ ...snapshot, now: 1000, run: { ...snapshot.run, delayed_since: delayedSince } });
  return store;
}

describe("findDelay", () => {
  test("returns what the site says while messages arrive", () => {
    expect(findDelay(createStore(null), RENDERED_AT)).toBeNull();
    expect(findDelay(createStore(950), RENDERED_AT)).toBe(950);
  });

  test("counts from the last message when they have stopped", () => {
    const store = createStore(null);
    store.setSilent(true);
    expect(findDelay(store, RENDERED_AT)).toBe(1000);
  });

  test("counts from the earlier of both", () => {
    const store = createStore(950);
    store.setSilent(true);
    expect(findDelay(store, RENDERED_AT)).toBe(950);
  });

  test("counts from what the server wrote when nothing has ever arrived", () => {
    const store = new Store();
    store.setSilent(true);
    expect(findDelay(store, RENDERED_AT)).toBe(RENDERED_AT);
  });
});

describe("summarizeRun", () => {
  const { run } = createSnapshot(1);

  test("says how many machines train and how long it takes", () => {
    expect(summarizeRun(run)).toBe("1 machine trains, about 15 min left.");
    const several = { ...run, workers_alive: 3, rate: 0 };
    expect(summarizeRun(several)).toBe("3 machines train.");
  });

  test("explains a loss that does not fall before the first exchange", () => {
    const sentence = summarizeRun({ ...run, workers_alive: 4, rate: 0, updates: 0 });
    expect(sentence).toMatch(/^4 machines train\. The shared weights are still those of the start/);
    expect(summarizeRun({ ...run, workers_alive: 0, updates: 0 })).not.toContain("exchange");
  });

  test("has a sentence for each status", () => {
    const statuses = ["draft", "recruiting", "paused", "finished", "cancelled"] as const;
    const sentences = statuses.map((status) => summarizeRun({ ...run, status }));
    expect(new Set(sentences).size).toBe(statuses.length);
    expect(sentences.every((sentence) => sentence.endsWith("."))).toBe(true);
  });
});
