import { expect, test } from "vitest";
import {
  formatAge,
  formatAxisCount,
  formatBytes,
  formatCount,
  formatDeviation,
  formatDuration,
  formatMoment,
  formatPercent,
  formatStepTime,
} from "../src/format";

test("formatCount keeps three significant digits from a thousand on", () => {
  const values = [0, 7, 999, 999.6, 1000, 12_345, 999_499, 999_600, 1_234_567, 10 ** 15];
  expect(values.map(formatCount)).toEqual(
    ["0", "7", "999", "1.00 K", "1.00 K", "12.3 K", "999 K", "1.00 M", "1.23 M", "1.00 P"],
  );
});

test("formatAxisCount drops trailing zeros", () => {
  const values = [0, 100, 500, 1500, 50_000, 100_000, 2_000_000, 1_250_000];
  expect(values.map(formatAxisCount)).toEqual(
    ["0", "100", "500", "1.5 K", "50 K", "100 K", "2 M", "1.25 M"],
  );
});

test("formatPercent shows 100 % only for a complete share", () => {
  const shares = [0, 0.001, 0.0994, 0.5, 0.9999, 1, 1.2];
  expect(shares.map(formatPercent)).toEqual(
    ["0 %", "0.1 %", "9.9 %", "50 %", "99 %", "100 %", "100 %"],
  );
});

test("formatAge selects the unit by the size", () => {
  const ages = [0, 12, 100, 7200, 200_000];
  expect(ages.map(formatAge)).toEqual(["now", "12 s", "2 min", "2 h", "2 d"]);
});

test("formatDuration uses at most two units", () => {
  expect([30, 600, 3900 * 2, 10 ** 6].map(formatDuration)).toEqual(
    ["30 s", "10 min", "2 h 10 min", "12 days"],
  );
});

test("formatStepTime keeps the digits that distinguish two steps", () => {
  const seconds = [0, 0.0002, 0.0034, 0.085, 0.0996, 0.254, 1, 5.44, 61.2, 192, 5399, 5400, NaN];
  expect(seconds.map(formatStepTime)).toEqual([
    "0 ms", "<1 ms", "3 ms", "85 ms", "0.10 s", "0.25 s", "1.0 s", "5.4 s", "61.2 s", "3.2 min",
    "90.0 min", "1.5 h", "–",
  ]);
});

test("formatBytes uses the same units as the form of a new run", () => {
  const bytes = [0, 5000, 30 * 2 ** 20, 3 * 2 ** 30, 18.25 * 2 ** 30, 1.24 * 2 ** 40];
  expect(bytes.map(formatBytes)).toEqual(
    ["0 MiB", "<1 MiB", "30 MiB", "3.0 GiB", "18.3 GiB", "1.2 TiB"],
  );
});

test("formatDeviation shows the sign and stops at 999 %", () => {
  expect([0.058, -0.124, 0.001, -0.001, 40, -40].map(formatDeviation)).toEqual(
    ["+6 %", "−12 %", "±0 %", "±0 %", ">999 %", "<−999 %"],
  );
});

test("formatMoment omits the date within the last day", () => {
  const noon = Date.UTC(2026, 5, 3, 12, 0, 0) / 1000;
  const format = (time: number) => formatMoment(time, noon, "UTC");
  expect([noon, noon - 3600, noon - 86_399].map(format)).toEqual(["12:00", "11:00", "12:00"]);
  expect(format(noon - 86_400)).toBe("2 Jun 12:00");
});
