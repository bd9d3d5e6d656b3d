import { describe, expect, test } from "vitest";
import { alignCurves, findRange, smoothingScale, smoothPoints } from "../src/movingAverage";
import type { Point } from "../src/types";

test("smoothPoints of a constant returns the constant", () => {
  const constant: Point[] = [[0, 2], [5, 2], [100, 2]];
  expect(smoothPoints(constant, 10).map(([, value]) => value)).toEqual([2, 2, 2]);
});

test("smoothPoints follows a jump after some points", () => {
  const jump: Point[] = Array.from({ length: 50 }, (_, i) => [i, i < 25 ? 4 : 2]);
  const smoothed = smoothPoints(jump, 3);
  expect(smoothed[25]![1]).toBeGreaterThan(3);
  expect(smoothed[49]![1]).toBeCloseTo(2, 2);
});

test("smoothingScale grows with the weight and is 0 without smoothing", () => {
  const points: Point[] = [[0, 1], [1000, 1]];
  expect(smoothingScale(points, 0)).toBe(0);
  expect(smoothingScale(points, 0.9)).toBeLessThan(smoothingScale(points, 0.99));
  expect(smoothingScale(points, 0.9)).toBeCloseTo(9.49, 2);
});

describe("findRange", () => {
  const values = Array.from({ length: 100 }, (_, i) => 2 + i / 100);

  test("leaves out a few far values if that is wanted", () => {
    const [low, high] = findRange([...values, 11, 12], true)!;
    expect(low).toBeGreaterThanOrEqual(2);
    expect(high).toBeLessThan(3);
    expect(findRange([...values, 11, 12], false)).toEqual([2, 12]);
  });

  test("shows all values of a short or an even curve", () => {
    expect(findRange([11, 4, 3], true)).toEqual([3, 11]);
    expect(findRange(values, true)).toEqual([2, 2.99]);
    expect(findRange([NaN, Infinity], true)).toBeNull();
  });
});

test("alignCurves leaves gaps where a curve has no point", () => {
  const aligned = alignCurves([[1, 10], [3, 30]], [[2, 20], [3, 31]]);
  expect(aligned).toEqual([[1, 2, 3], [10, null, 30], [null, 20, 31]]);
});
