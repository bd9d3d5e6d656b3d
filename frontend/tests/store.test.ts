import { describe, expect, test } from "vitest";
import { selectSecond, mergeEvents, mergePoints, Store, thinPoints } from "../src/store";
import type { Delta, Point, Snapshot } from "../src/types";
import {
  createDelta,
  createEvent,
  createExchange,
  createMachine,
  createPlan,
  createSnapshot,
} from "./messages";

/** Create a delta that adds one point and sets the run's tokens. */
function createPointDelta(seq: number): Delta {
  return createDelta(seq, { train: [[seq * 100, 5 - seq / 10]], run: { tokens: seq * 100 } });
}

describe("Store", () => {
  test("applies the deltas that follow a snapshot", () => {
    const store = new Store();
    expect(store.applySnapshot(createSnapshot(7))).toBe("applied");
    const delta = createDelta(8, {
      run: { tokens: 2000 },
      train: [[200, 4]],
      workers: [createMachine("b", 5)],
    });
    expect(store.applyDelta(delta)).toBe("applied");
    expect(store.run?.tokens).toBe(2000);
    expect(store.run?.budget).toBe(10_000);
    expect(store.curves.train).toEqual([[100, 5], [200, 4]]);
    expect([...store.workers.keys()]).toEqual(["a", "b"]);
    expect(store.now).toBe(108);
  });

  test("removes the machines that a delta lists as removed and adds its others", () => {
    const store = new Store();
    store.applySnapshot(createSnapshot(0));
    store.applyDelta(
      createDelta(1, { removed_workers: ["a", "unknown"], workers: [createMachine("b", 5)] }),
    );
    expect([...store.workers.keys()]).toEqual(["b"]);
    store.applyDelta(createDelta(2, { removed_workers: ["b"], workers: [createMachine("a", 6)] }));
    expect([...store.workers.keys()]).toEqual(["a"]);
  });

  test("changes the fields of a machine that a delta names, and no others", () => {
    const store = new Store();
    const exchange = createExchange();
    store.applySnapshot(createSnapshot(0, { workers: [{ ...createMachine("a"), exchange }] }));
    const before = store.workers.get("a");
    store.applyDelta(
      createDelta(1, {
        worker_changes: [{ id: "a", tokens: 7, exchange: { lag: 3 } }, { id: "unknown", tokens: 1 }],
      }),
    );
    const changed = { ...createMachine("a", 7), exchange: { ...exchange, lag: 3 } };
    expect([...store.workers.values()]).toEqual([changed]);
    expect(before).toEqual({ ...createMachine("a"), exchange });
    store.applyDelta(createDelta(2, { worker_changes: [{ id: "a", exchange: null }] }));
    expect(store.workers.get("a")?.exchange).toBeNull();
    store.applyDelta(createDelta(3, { worker_changes: [{ id: "a", exchange }] }));
    expect(store.workers.get("a")).toEqual({ ...createMachine("a", 7), exchange });
  });

  test("keeps a machine's plan until it changes or a snapshot lacks it", () => {
    const store = new Store();
    store.applySnapshot(createSnapshot(0, { plans: { a: createPlan() } }));
    store.applyDelta(createDelta(1, { workers: [createMachine("a", 5)] }));
    expect(store.plans.get("a")).toEqual(createPlan());
    store.applyDelta(createDelta(2, { plans: { a: createPlan({ groups: 1 }), b: createPlan() } }));
    expect([...store.plans].map(([id, { groups }]) => [id, groups])).toEqual([["a", 1], ["b", 12]]);
    store.applySnapshot(createSnapshot(3, { plans: { b: createPlan() } }));
    expect([...store.plans.keys()]).toEqual(["b"]);
  });

  test("applies a snapshot of an older site without plans, events and clock", () => {
    const store = new Store();
    const { plans: _plans, events: _events, clock: _clock, ...older } = createSnapshot(0);
    expect(store.applySnapshot(older as Snapshot)).toBe("applied");
    expect(store.plans.size).toBe(0);
    expect(store.events).toEqual([]);
    expect(store.curves.clock).toEqual([]);
  });

  test("lists each event once, the newest first, until a snapshot lacks it", () => {
    const store = new Store();
    const first = [createEvent("b", 20), createEvent("a", 10)];
    const second = [createEvent("d", 20), createEvent("b", 20), createEvent("c", 15)];
    store.applySnapshot(createSnapshot(0, { events: first }));
    store.applyDelta(createDelta(1, { events: second }));
    expect(store.events.map(({ id }) => id)).toEqual(["d", "b", "c", "a"]);
    store.applySnapshot(createSnapshot(2, { events: [createEvent("b", 20)] }));
    expect(store.events.map(({ id }) => id)).toEqual(["b"]);
  });

  test("replaces all machine curves and notifies the listeners", () => {
    const store = new Store();
    let notifications = 0;
    store.subscribe(() => (notifications += 1));
    store.setCurves([{ id: "a", name: "barn", points: [[2, 4], [1, 5]], rates: [] }]);
    store.setCurves([{ id: "b", name: "loft", points: [], rates: [] }]);
    expect(store.workerCurves).toEqual([{ id: "b", name: "loft", points: [], rates: [] }]);
    expect(notifications).toBe(2);
  });

  test("drops a delta that arrives twice", () => {
    const store = new Store();
    store.applySnapshot(createSnapshot(0));
    store.applyDelta(createPointDelta(1));
    expect(store.applyDelta(createPointDelta(1))).toBe("stale");
    expect(store.applyDelta(createDelta(0, { run: { tokens: 1 } }))).toBe("stale");
    expect(store.run?.tokens).toBe(100);
    expect(store.curves.train).toHaveLength(1);
  });

  test("reports a gap and applies nothing from beyond it before a snapshot", () => {
    const store = new Store();
    store.applySnapshot(createSnapshot(0));
    expect(store.applyDelta(createPointDelta(2))).toBe("gap");
    expect(store.run?.tokens).toBe(1000);
    expect(store.seq).toBe(0);
    const snapshot = createSnapshot(2, { train: [[100, 4.9], [200, 4.8]] });
    expect(store.applySnapshot(snapshot)).toBe("applied");
    expect(store.applyDelta(createPointDelta(3))).toBe("applied");
    expect(store.curves.train.map((p) => p[0])).toEqual([100, 200, 300]);
  });

  test("applies early deltas in order once the missing one arrives", () => {
    const store = new Store();
    store.applySnapshot(createSnapshot(0, { train: [] }));
    expect(store.applyDelta(createPointDelta(3))).toBe("gap");
    expect(store.applyDelta(createPointDelta(2))).toBe("gap");
    expect(store.applyDelta(createPointDelta(1))).toBe("applied");
    expect(store.seq).toBe(3);
    expect(store.run?.tokens).toBe(300);
    expect(store.curves.train.map((p) => p[0])).toEqual([100, 200, 300]);
  });

  test("applies the deltas that arrived before the first snapshot and follow it", () => {
    const store = new Store();
    for (const seq of [4, 5, 6]) expect(store.applyDelta(createPointDelta(seq))).toBe("gap");
    expect(store.applySnapshot(createSnapshot(5))).toBe("applied");
    expect(store.seq).toBe(6);
    expect(store.run?.tokens).toBe(600);
  });

  test("reports a gap if a snapshot ends before a waiting delta", () => {
    const store = new Store();
    store.applyDelta(createPointDelta(9));
    expect(store.applySnapshot(createSnapshot(5))).toBe("gap");
    expect(store.applySnapshot(createSnapshot(9))).toBe("applied");
  });

  test("has the same state after any order and duplication of deltas", () => {
    const deltas = [1, 2, 3, 4, 5, 6].map(createPointDelta);
    const ordered = new Store();
    ordered.applySnapshot(createSnapshot(0));
    deltas.forEach((delta) => ordered.applyDelta(delta));
    for (let seed = 1; seed <= 50; seed++) {
      const shuffled = [...deltas, ...deltas]
        .map((delta, i) => ({ delta, at: Math.sin(seed * 1000 + i * 7) }))
        .sort((a, b) => a.at - b.at);
      const store = new Store();
      store.applySnapshot(createSnapshot(0));
      shuffled.forEach(({ delta }) => store.applyDelta(delta));
      expect(store.curves).toEqual(ordered.curves);
      expect(store.run).toEqual(ordered.run);
      expect(store.seq).toBe(6);
    }
  });

  test("accepts a newer snapshot whose numbers start again", () => {
    const store = new Store();
    store.applySnapshot(createSnapshot(900));
    expect(store.applySnapshot(createSnapshot(3, { now: 5000 }))).toBe("applied");
    expect(store.applyDelta(createDelta(4, { now: 5001, run: { tokens: 4 } }))).toBe("applied");
    expect(store.run?.tokens).toBe(4);
  });

  test("notifies listeners once for each delta until they unsubscribe", () => {
    const store = new Store();
    let notifications = 0;
    const unsubscribe = store.subscribe(() => (notifications += 1));
    store.applySnapshot(createSnapshot(0));
    store.applyDelta(createPointDelta(1));
    store.applyDelta(createPointDelta(1));
    unsubscribe();
    store.applyDelta(createPointDelta(2));
    expect(notifications).toBe(2);
  });

  test("applies deltas that arrive together like one after the other, and notifies once", () => {
    const [alone, together] = [new Store(), new Store()];
    const deltas = Array.from({ length: 1_200 }, (_, i) => createPointDelta(i + 1));
    for (const store of [alone, together]) store.applySnapshot(createSnapshot(0));
    for (const delta of deltas) alone.applyDelta(delta);
    let notifications = 0;
    together.subscribe(() => notifications++);
    expect(together.applyDeltas([deltas[1]!, deltas[0]!, deltas[0]!])).toBe("applied");
    expect(together.applyDeltas(deltas.slice(2, 4).concat(deltas.slice(5, 7)))).toBe("gap");
    expect(together.applyDeltas(deltas.slice(0, 4))).toBe("stale");
    expect(together.applyDeltas(deltas.slice(4, 900))).toBe("applied");
    expect(together.applyDeltas(deltas)).toBe("applied");
    expect(notifications).toBe(4);
    expect([together.seq, together.run?.tokens]).toEqual([alone.seq, alone.run?.tokens]);
    expect(together.curves).toEqual(alone.curves);
  });
});

test("mergeEvents keeps a bounded number of the newest events", () => {
  const many = Array.from({ length: 900 }, (_, i) => createEvent(`e${i}`, i));
  const merged = mergeEvents(many.slice(0, 500), many.slice(400));
  expect(merged).toHaveLength(200);
  expect([merged[0]!.at, merged.at(-1)!.at]).toEqual([899, 700]);
});

describe("curves", () => {
  test("mergePoints inserts a late point in order and replaces a repeated one", () => {
    const present: Point[] = [[1, 1], [3, 3]];
    expect(mergePoints(present, [[2, 2], [3, 30]])).toEqual([[1, 1], [2, 2], [3, 30]]);
  });

  test("thinPoints reduces a curve, and keeps its end and its mean", () => {
    const points: Point[] = Array.from({ length: 5000 }, (_, i) => [i, 1]);
    const thinned = thinPoints(points);
    expect(thinned.length).toBeLessThanOrEqual(1600);
    expect(thinned.at(-1)).toEqual([4999, 1]);
    expect(thinned.every(([, y]) => y === 1)).toBe(true);
    expect(thinned.every(([x], i) => i === 0 || x > thinned[i - 1]![0])).toBe(true);
  });

  test("a thinned clock has only times that were measured", () => {
    const clock: Point[] = Array.from({ length: 3000 }, (_, i) => [i, i < 1001 ? i : i + 90_000]);
    const measured = new Set(clock.map(([, time]) => time));
    expect(thinPoints(clock, selectSecond).every(([, time]) => measured.has(time))).toBe(true);
    const store = new Store();
    store.applySnapshot(createSnapshot(0, { clock }));
    expect(store.curves.clock.length).toBeLessThanOrEqual(1000);
    expect(store.curves.clock.every(([, time]) => measured.has(time))).toBe(true);
  });
});
