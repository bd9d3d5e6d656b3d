import { expect, test } from "vitest";
import { findChartInterval, findPageInterval, findPixelTime } from "../src/drawPace";

test("findPageInterval draws each delta on a fast device and every fifth on a slow one", () => {
  expect([1, 5, 10, 1000].map(findPageInterval)).toEqual([100, 900, 1900, 4900]);
});

test("findChartInterval follows what new points cost and what they change", () => {
  expect(findChartInterval(1, 500)).toBe(4_000);
  expect(findChartInterval(14, 500)).toBe(7_000);
  expect(findChartInterval(1, 9_000)).toBe(9_000);
  expect(findChartInterval(1, Infinity)).toBe(15_000);
  expect(findChartInterval(1_000, 0)).toBe(15_000);
});

test("findPixelTime is the time for one pixel, and endless for curves that do not grow", () => {
  expect(findPixelTime(86_400, 800, 1)).toBe(108_000);
  expect(findPixelTime(60, 800, Infinity)).toBe(0);
  expect(findPixelTime(60, 800, 0)).toBe(Infinity);
  expect(findPixelTime(60, 0, 1)).toBe(Infinity);
});
