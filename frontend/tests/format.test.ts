import { expect, test } from "vitest";
import {
  formatAge,
  formatAxisCount,
  formatBytes,
  formatCount,
  formatAxisDuration,
  formatAxisValue,
  formatValue,
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

test("formatValue and formatAxisValue show values of every size", () => {
  expect([0, 6e-4, 0.75, 12.345, 12_345].map(formatValue)).toEqual(
    ["0", "6.00e-4", "0.750", "12.3", "12.3 K"],
  );
  expect([0, 6e-4, 0.5, 20, 1_500].map(formatAxisValue)).toEqual(
    ["0", "6e-4", "0.5", "20", "1.5 K"],
  );
});

test("formatAxisDuration uses the unit that fits", () => {
  expect([0, 90, 600, 9000, 200_000].map(formatAxisDuration)).toEqual(
    ["0 s", "90 s", "10 min", "2.5 h", "2.3 d"],
  );
});

test("formatMoment omits the date on the same day", () => {
  const noon = Date.UTC(2026, 5, 3, 12, 0, 0) / 1000;
  const format = (time: number) => formatMoment(time, noon, "UTC");
  expect([noon, noon - 3600, noon - 43_200].map(format)).toEqual(["12:00", "11:00", "00:00"]);
  expect(format(noon - 43_260)).toBe("2 Jun 23:59");
  expect(format(noon - 86_400)).toBe("2 Jun 12:00");
});
