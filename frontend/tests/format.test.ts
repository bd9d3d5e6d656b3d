import { expect, test } from "vitest";
import { ago, bytes, count, deviation, duration, mark, moment, percent, seconds } from "../src/format";
import { align, smooth } from "../src/movingAverage";
import type { Point } from "../src/types";

test("counts keep three digits whatever their size", () => {
  expect([0, 7, 999, 999.6, 1000, 12_345, 999_499, 999_600, 1_234_567, 10 ** 15].map(count)).toEqual(
    ["0", "7", "999", "1.00 K", "1.00 K", "12.3 K", "999 K", "1.00 M", "1.23 M", "1.00 P"],
  );
});

test("the marks of an axis carry no zeros they do not need", () => {
  expect([0, 100, 500, 1500, 50_000, 100_000, 2_000_000, 1_250_000].map(mark)).toEqual(
    ["0", "100", "500", "1.5 K", "50 K", "100 K", "2 M", "1.25 M"],
  );
});

test("shares never claim to be done before they are", () => {
  expect([0, 0.001, 0.0994, 0.5, 0.9999, 1, 1.2].map(percent)).toEqual(["0 %", "0.1 %", "9.9 %", "50 %", "99 %", "100 %", "100 %"]);
});

test("times are said in the unit one would say them in", () => {
  expect([0, 12, 100, 7200, 200_000].map(ago)).toEqual(["now", "12 s", "2 min", "2 h", "2 d"]);
  expect([30, 600, 3900 * 2, 10 ** 6].map(duration)).toEqual(["30 s", "10 min", "2 h 10 min", "12 days"]);
});

test("a step's seconds keep the digits that tell two of them apart", () => {
  expect([0, 0.0002, 0.0034, 0.085, 0.0996, 0.254, 1, 5.44, 61.2, 192, 5399, 5400, NaN].map(seconds)).toEqual(
    ["0 ms", "<1 ms", "3 ms", "85 ms", "0.10 s", "0.25 s", "1.0 s", "5.4 s", "61.2 s", "3.2 min", "90.0 min", "1.5 h", "–"],
  );
});

test("bytes are said as the form of a new run says them", () => {
  expect([0, 5000, 30 * 2 ** 20, 3 * 2 ** 30, 18.25 * 2 ** 30, 1.24 * 2 ** 40].map(bytes)).toEqual(
    ["0 MiB", "<1 MiB", "30 MiB", "3.0 GiB", "18.3 GiB", "1.2 TiB"],
  );
});

test("a deviation has its sign and an end", () => {
  expect([0.058, -0.124, 0.001, -0.001, 40, -40].map(deviation)).toEqual(
    ["+6 %", "−12 %", "±0 %", "±0 %", ">999 %", "<−999 %"],
  );
});

test("a smoothed constant is that constant, and a step is followed", () => {
  const flat: Point[] = [[0, 2], [5, 2], [100, 2]];
  expect(smooth(flat, 10).map((p) => p[1])).toEqual([2, 2, 2]);
  const step: Point[] = [...Array(50).keys()].map((i) => [i, i < 25 ? 4 : 2]);
  const line = smooth(step, 3);
  expect(line[25]![1]).toBeGreaterThan(3);
  expect(line[49]![1]).toBeCloseTo(2, 2);
});

test("series on one axis keep gaps where they have no point", () => {
  expect(align([[1, 10], [3, 30]], [[2, 20], [3, 31]])).toEqual([[1, 2, 3], [10, null, 30], [null, 20, 31]]);
});

test("a moment of the last day is its time, an earlier one has its date", () => {
  const noon = Date.UTC(2026, 5, 3, 12, 0, 0) / 1000;
  expect([noon, noon - 3600, noon - 86_399].map((at) => moment(at, noon, "UTC"))).toEqual(["12:00", "11:00", "12:00"]);
  expect(moment(noon - 86_400, noon, "UTC")).toBe("2 Jun 12:00");
});
