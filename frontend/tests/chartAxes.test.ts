import { describe, expect, test } from "vitest";
import {
  countActiveSeconds,
  createXMapping,
  findAxisSpeed,
  findFirstAfter,
  findGapsInPauses,
  findPauses,
  findTrainingPauses,
  mapPoints,
} from "../src/chartAxes";
import type { Point } from "../src/types";

const CLOCK: Point[] = [[100, 1000], [200, 1010], [400, 1020]];

describe("createXMapping", () => {
  test("along tokens returns the tokens", () => {
    expect(createXMapping("tokens", 64, CLOCK).fromTokens(128)).toBe(128);
  });

  test("along steps divides by the tokens of one step", () => {
    expect(createXMapping("steps", 64, CLOCK).fromTokens(128)).toBe(2);
    expect(createXMapping("steps", 0, CLOCK).fromTokens(128)).toBe(128);
  });

  test("along time interpolates between known times and stops at the ends", () => {
    const mapX = createXMapping("time", 64, CLOCK).fromTokens;
    const times = [0, 100, 150, 200, 300, 400, 900].map(mapX);
    expect(times).toEqual([1000, 1000, 1005, 1010, 1015, 1020, 1020]);
    expect(createXMapping("time", 64, []).fromTokens(5)).toBe(0);
  });

  test("along time with a clock that goes back never decreases", () => {
    const { fromTokens: mapX } = createXMapping("time", 64, [[100, 1000], [200, 940], [300, 1030]]);
    const times = Array.from({ length: 40 }, (_, i) => mapX(i * 10));
    expect(times.every((time, i) => i === 0 || time >= times[i - 1]!)).toBe(true);
    expect(mapX(300)).toBe(1030);
  });

  test("places curves over time on the axes of tokens and steps", () => {
    const { fromTime } = createXMapping("steps", 10, CLOCK);
    expect([990, 1000, 1005, 1020, 2000].map(fromTime)).toEqual([10, 10, 15, 40, 40]);
  });

  test("along training time leaves out pauses", () => {
    const rate: Point[] = [[1000, 5], [1010, 5], [1020, 0], [1030, 0], [1900, 0], [1910, 5], [1920, 5]];
    const { fromTime, fromTokens } = createXMapping("active", 64, CLOCK, rate);
    expect([1000, 1010, 1020, 1900, 1910, 1920].map(fromTime)).toEqual([0, 10, 20, 20, 30, 40]);
    expect(fromTokens(150)).toBe(5);
  });
});

test("findAxisSpeed is in the units of the axis", () => {
  expect(findAxisSpeed("tokens", 64, 640)).toBe(640);
  expect(findAxisSpeed("steps", 64, 640)).toBe(10);
  expect(findAxisSpeed("time", 64, 640)).toBe(1);
  expect(findAxisSpeed("active", 64, 640)).toBe(1);
});

test("countActiveSeconds counts a long gap as one usual interval", () => {
  const points: Point[] = [[0, 1], [10, 1], [20, 1], [9000, 1], [9010, 1]];
  expect(countActiveSeconds(points).at(-1)).toEqual([9010, 40]);
  expect(countActiveSeconds([])).toEqual([]);
});

describe("findPauses", () => {
  test("finds outages, also two in a row", () => {
    expect(findPauses([0, 60, 120, 180, 9000, 9060, 9120])).toEqual([[180, 9000]]);
    const twice = [0, 60, 120, 180, 4000, 9000, 9060, 9120, 9180];
    expect(findPauses(twice)).toEqual([[180, 4000], [4000, 9000]]);
  });

  test("finds none between older, coarser points", () => {
    const hours = Array.from({ length: 9 }, (_, i) => i * 3600);
    const minutes = Array.from({ length: 9 }, (_, i) => 8 * 3600 + (i + 1) * 60);
    expect(findPauses([...hours, ...minutes])).toEqual([]);
    expect(findPauses([0, 60, 120, 300, 360])).toEqual([]);
  });

  test("finds none without an interval to compare with", () => {
    expect([[], [5], [5, 9000]].map(findPauses)).toEqual([[], [], []]);
  });
});

test("findTrainingPauses finds when no machine reported, and when all stood still", () => {
  const rate: Point[] = [[0, 5], [10, 5], [20, 5], [30, 0], [40, 0], [500, 0], [510, 5], [520, 5]];
  expect(findTrainingPauses(rate)).toEqual([[20, 510]]);
  expect(findTrainingPauses([])).toEqual([]);
});

describe("findGapsInPauses", () => {
  const pauses: [number, number][] = [[100, 1000], [2000, 2600]];

  test("finds those between the last loss before a pause and the first one after it", () => {
    expect(findGapsInPauses([0, 50, 105, 1010, 1060, 1990, 2590], pauses)).toEqual([
      [105, 1010],
      [1990, 2590],
    ]);
    expect(findGapsInPauses([90, 1010, 2610], pauses)).toEqual([[90, 1010]]);
  });

  test("finds none where losses go on, however irregularly", () => {
    const steady = Array.from({ length: 60 }, (_, i) => i * 50 + (i % 7) * 5);
    expect(findGapsInPauses(steady, pauses)).toEqual([]);
    expect(findGapsInPauses([0, 1, 2, 40, 41, 99], pauses)).toEqual([]);
    expect([[], [5]].map((times) => findGapsInPauses(times, pauses))).toEqual([[], []]);
  });

  test("cuts a mean of losses before and after a pause off on both sides", () => {
    expect(findGapsInPauses([95, 550, 1005], pauses)).toEqual([[95, 550], [550, 1005]]);
  });
});

test("mapPoints keeps the last of the points with the same position", () => {
  const points: Point[] = [[1, 5], [2, 4], [3, 3]];
  expect(mapPoints(points, (tokens) => Math.min(tokens, 2))).toEqual([[1, 5], [2, 3]]);
});

test("findFirstAfter returns the index of the first point past a position", () => {
  const indices = [-1, 100, 150, 400, 500].map((x) => findFirstAfter(CLOCK, x));
  expect(indices).toEqual([0, 1, 1, 3, 3]);
});
