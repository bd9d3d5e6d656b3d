import { describe, expect, test } from "vitest";
import { Store } from "../src/store";
import { findDelay } from "../src/views/runNotices";
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
