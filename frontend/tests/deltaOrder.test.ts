import { beforeEach, describe, expect, test } from "vitest";
import { DeltaOrder } from "../src/deltaOrder";
import { createDelta, createSnapshot } from "./messages";

let order: DeltaOrder;

function accept(...numbers: number[]): string[] {
  return numbers.map((seq) => order.accept(createDelta(seq)));
}

function releasedNumbers(): number[] {
  return order.releaseWaiting().map(({ seq }) => seq);
}

beforeEach(() => {
  order = new DeltaOrder();
});

describe("DeltaOrder", () => {
  test("stores every delta until the first snapshot, and releases those that follow it", () => {
    expect(accept(4, 6, 5)).toEqual(["gap", "gap", "gap"]);
    expect(order.acceptSnapshot(createSnapshot(4))).toBe(true);
    expect(releasedNumbers()).toEqual([5, 6]);
    expect([order.seq, order.now, order.hasGap]).toEqual([6, 106, false]);
  });

  test("accepts the next delta, drops a repeated one and stores an early one", () => {
    order.acceptSnapshot(createSnapshot(0));
    expect(accept(1, 1, 0, 4, 3, 2)).toEqual(["applied", "stale", "stale", "gap", "gap", "applied"]);
    expect([order.hasGap, releasedNumbers(), order.seq, order.hasGap]).toEqual([true, [3, 4], 4, false]);
  });

  test("has a gap until a snapshot passes the missing deltas", () => {
    order.acceptSnapshot(createSnapshot(0));
    accept(9);
    order.acceptSnapshot(createSnapshot(5));
    expect([releasedNumbers(), order.hasGap]).toEqual([[], true]);
    order.acceptSnapshot(createSnapshot(9));
    expect([releasedNumbers(), order.hasGap]).toEqual([[], false]);
  });

  test("refuses an older snapshot, but not a newer one whose numbers start again", () => {
    order.acceptSnapshot(createSnapshot(9));
    expect(order.acceptSnapshot(createSnapshot(4))).toBe(false);
    expect(order.acceptSnapshot(createSnapshot(3, { now: 5000 }))).toBe(true);
    expect(accept(4)).toEqual(["applied"]);
  });

  test("drops what waits for a mirror that the page has left", () => {
    order.acceptSnapshot(createSnapshot(1000));
    accept(1002);
    order.expectOtherMirror();
    expect([order.hasGap, accept(8)]).toEqual([false, ["gap"]]);
    expect(order.acceptSnapshot(createSnapshot(7, { now: 1 }))).toBe(true);
    expect(releasedNumbers()).toEqual([8]);
  });

  test("stores a bounded number of early deltas", () => {
    order.acceptSnapshot(createSnapshot(0));
    for (let seq = 2; seq < 500; seq++) accept(seq);
    accept(1);
    expect([releasedNumbers(), order.seq]).toEqual([[], 1]);
  });
});
