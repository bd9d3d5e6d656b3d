import { expect, test } from "vitest";
import { across, firstAfter, laid } from "../src/chartAxes";
import type { Point } from "../src/types";

const CLOCK: Point[] = [[100, 1000], [200, 1010], [400, 1020]];

test("tokens lie where they are, and steps are tokens of one step each", () => {
  expect(across("tokens", 64, CLOCK)(128)).toBe(128);
  expect(across("steps", 64, CLOCK)(128)).toBe(2);
  expect(across("steps", 0, CLOCK)(128)).toBe(128);
});

test("the time of a count of tokens lies between those that are known, and nowhere past them", () => {
  const time = across("time", 64, CLOCK);
  expect([0, 100, 150, 200, 300, 400, 900].map(time)).toEqual([1000, 1000, 1005, 1010, 1015, 1020, 1020]);
  expect(across("time", 64, [])(5)).toBe(0);
});

test("a clock that goes back does not fold the line", () => {
  const time = across("time", 64, [[100, 1000], [200, 940], [300, 1030]]);
  const seen = Array.from({ length: 40 }, (_, i) => time(i * 10));
  expect(seen.every((at, i) => i === 0 || at >= seen[i - 1]!)).toBe(true);
  expect(time(300)).toBe(1030);
});

test("points that come to lie at one place are one", () => {
  expect(laid([[1, 5], [2, 4], [3, 3]], (tokens) => Math.min(tokens, 2))).toEqual([[1, 5], [2, 3]]);
});

test("the first point past a place is found", () => {
  expect([-1, 100, 150, 400, 500].map((tokens) => firstAfter(CLOCK, tokens))).toEqual([0, 1, 1, 3, 3]);
});
