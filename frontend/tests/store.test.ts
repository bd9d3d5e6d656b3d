import { describe, expect, test } from "vitest";
import { mergePoints, mergeEvents, Store, thinPoints } from "../src/store";
import type { Delta, Point, Snapshot } from "../src/types";
import { delta, event, plan, snapshot, worker } from "./messages";

function point(seq: number): Delta {
  return delta(seq, { train: [[seq * 100, 5 - seq / 10]], run: { tokens: seq * 100 } });
}

describe("the store", () => {
  test("applies the deltas that follow a snapshot", () => {
    const store = new Store();
    expect(store.applySnapshot(snapshot(7))).toBe("applied");
    expect(store.applyDelta(delta(8, { run: { tokens: 2000 }, train: [[200, 4]], workers: [worker("b", 5)] }))).toBe("applied");
    expect(store.run?.tokens).toBe(2000);
    expect(store.run?.budget).toBe(10_000);
    expect(store.series.train).toEqual([[100, 5], [200, 4]]);
    expect([...store.workers.keys()]).toEqual(["a", "b"]);
    expect(store.now).toBe(108);
  });

  test("forgets machines that are shown no more, and takes what is told of others in the same breath", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0));
    store.applyDelta(delta(1, { removed_workers: ["a", "never there"], workers: [worker("b", 5)] }));
    expect([...store.workers.keys()]).toEqual(["b"]);
    store.applyDelta(delta(2, { removed_workers: ["b"], workers: [worker("a", 6)] }));
    expect([...store.workers.keys()]).toEqual(["a"]);
  });

  test("keeps a machine's plan until another one is told, and forgets those a snapshot does not hold", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0, { plans: { a: plan() } }));
    store.applyDelta(delta(1, { workers: [worker("a", 5)] }));
    expect(store.plans.get("a")).toEqual(plan());
    store.applyDelta(delta(2, { plans: { a: plan({ groups: 1 }), b: plan() } }));
    expect([...store.plans].map(([id, { groups }]) => [id, groups])).toEqual([["a", 1], ["b", 12]]);
    store.applySnapshot(snapshot(3, { plans: { b: plan() } }));
    expect([...store.plans.keys()]).toEqual(["b"]);
  });

  test("reads a site that speaks of no plans, no events and no clock", () => {
    const store = new Store();
    const { plans: _, events: __, clock: ___, ...older } = snapshot(0);
    expect(store.applySnapshot(older as Snapshot)).toBe("applied");
    expect(store.plans.size).toBe(0);
    expect(store.events).toEqual([]);
    expect(store.series.clock).toEqual([]);
  });

  test("lists what happened newest first and once, and forgets what a snapshot does not hold", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0, { events: [event("b", 20), event("a", 10)] }));
    store.applyDelta(delta(1, { events: [event("d", 20), event("b", 20), event("c", 15)] }));
    expect(store.events.map(({ id }) => id)).toEqual(["d", "b", "c", "a"]);
    store.applySnapshot(snapshot(2, { events: [event("b", 20)] }));
    expect(store.events.map(({ id }) => id)).toEqual(["b"]);
  });

  test("takes machines' lines whole, and tells of them", () => {
    const store = new Store();
    let told = 0;
    store.subscribe(() => (told += 1));
    store.setCurves([{ id: "a", name: "barn", points: [[2, 4], [1, 5]] }]);
    store.setCurves([{ id: "b", name: "loft", points: [] }]);
    expect(store.curves).toEqual([{ id: "b", name: "loft", points: [] }]);
    expect(told).toBe(2);
  });

  test("drops what comes twice", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0));
    store.applyDelta(point(1));
    expect(store.applyDelta(point(1))).toBe("stale");
    expect(store.applyDelta(delta(0, { run: { tokens: 1 } }))).toBe("stale");
    expect(store.run?.tokens).toBe(100);
    expect(store.series.train).toHaveLength(1);
  });

  test("asks for a snapshot at a gap and shows nothing from beyond it", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0));
    expect(store.applyDelta(point(2))).toBe("gap");
    expect(store.run?.tokens).toBe(1000);
    expect(store.seq).toBe(0);
    expect(store.applySnapshot(snapshot(2, { train: [[100, 4.9], [200, 4.8]] }))).toBe("applied");
    expect(store.applyDelta(point(3))).toBe("applied");
    expect(store.series.train.map((p) => p[0])).toEqual([100, 200, 300]);
  });

  test("puts overtaken deltas back in order without a snapshot", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0, { train: [] }));
    expect(store.applyDelta(point(3))).toBe("gap");
    expect(store.applyDelta(point(2))).toBe("gap");
    expect(store.applyDelta(point(1))).toBe("applied");
    expect(store.seq).toBe(3);
    expect(store.run?.tokens).toBe(300);
    expect(store.series.train.map((p) => p[0])).toEqual([100, 200, 300]);
  });

  test("keeps deltas that come before the first snapshot and applies those it does not hold", () => {
    const store = new Store();
    for (const seq of [4, 5, 6]) expect(store.applyDelta(point(seq))).toBe("gap");
    expect(store.applySnapshot(snapshot(5))).toBe("applied");
    expect(store.seq).toBe(6);
    expect(store.run?.tokens).toBe(600);
  });

  test("a snapshot that leaves a hole before a waiting delta is still a gap", () => {
    const store = new Store();
    store.applyDelta(point(9));
    expect(store.applySnapshot(snapshot(5))).toBe("gap");
    expect(store.applySnapshot(snapshot(9))).toBe("applied");
  });

  test("any order and any duplication of the same deltas gives the same state", () => {
    const deltas = [1, 2, 3, 4, 5, 6].map(point);
    const straight = new Store();
    straight.applySnapshot(snapshot(0));
    deltas.forEach((delta) => straight.applyDelta(delta));
    for (let seed = 1; seed <= 50; seed++) {
      const shuffled = [...deltas, ...deltas]
        .map((delta, i) => ({ delta, at: Math.sin(seed * 1000 + i * 7) }))
        .sort((a, b) => a.at - b.at);
      const store = new Store();
      store.applySnapshot(snapshot(0));
      shuffled.forEach(({ delta }) => store.applyDelta(delta));
      expect(store.series).toEqual(straight.series);
      expect(store.run).toEqual(straight.run);
      expect(store.seq).toBe(6);
    }
  });

  test("an overtaken older snapshot does not turn time back", () => {
    const store = new Store();
    store.applySnapshot(snapshot(9, { run: { ...snapshot(9).run, tokens: 900 } }));
    expect(store.applySnapshot(snapshot(4))).toBe("stale");
    expect(store.run?.tokens).toBe(900);
  });

  test("a restarted site that counts anew is believed", () => {
    const store = new Store();
    store.applySnapshot(snapshot(900));
    expect(store.applySnapshot(snapshot(3, { now: 5000 }))).toBe("applied");
    expect(store.applyDelta(delta(4, { now: 5001, run: { tokens: 4 } }))).toBe("applied");
    expect(store.run?.tokens).toBe(4);
  });

  test("notifies listeners once per delta, until they unsubscribe", () => {
    const store = new Store();
    let told = 0;
    const leave = store.subscribe(() => (told += 1));
    store.applySnapshot(snapshot(0));
    store.applyDelta(point(1));
    store.applyDelta(point(1));
    leave();
    store.applyDelta(point(2));
    expect(told).toBe(2);
  });

  test("does not keep more than a bounded number of early deltas", () => {
    const store = new Store();
    store.applySnapshot(snapshot(0));
    for (let seq = 2; seq < 500; seq++) store.applyDelta(point(seq));
    store.applyDelta(point(1));
    expect(store.seq).toBe(1);
  });
});

test("a list of events stays bounded, and keeps the newest", () => {
  const many = Array.from({ length: 900 }, (_, i) => event(`e${i}`, i));
  const kept = mergeEvents(many.slice(0, 500), many.slice(400));
  expect(kept).toHaveLength(200);
  expect([kept[0]!.at, kept.at(-1)!.at]).toEqual([899, 700]);
});

describe("series", () => {
  test("a late point goes to its place and a point told twice stays once", () => {
    const known: Point[] = [[1, 1], [3, 3]];
    expect(mergePoints(known, [[2, 2], [3, 30]])).toEqual([[1, 1], [2, 2], [3, 30]]);
  });

  test("stay bounded, keep their ends and their mean", () => {
    const points: Point[] = Array.from({ length: 5000 }, (_, i) => [i, 1]);
    const thinned = thinPoints(points);
    expect(thinned.length).toBeLessThanOrEqual(1600);
    expect(thinned.at(-1)).toEqual([4999, 1]);
    expect(thinned.every(([, y]) => y === 1)).toBe(true);
    expect(thinned.every(([x], i) => i === 0 || x > thinned[i - 1]![0])).toBe(true);
  });
});
