import { expect, test } from "vitest";
import examplesOfFormats from "../../tests/contract/golden/formats.json";
import {
  formatAge,
  formatAxisCount,
  formatByteRate,
  formatBytes,
  formatCount,
  formatAxisDuration,
  formatAxisValue,
  formatValue,
  formatDuration,
  formatLoss,
  formatMoment,
  formatPercent,
  formatStepTime,
} from "../src/format";

const WRITERS: Record<string, (value: number) => string> = {
  bytes: formatBytes,
  byteRate: formatByteRate,
  count: formatCount,
  duration: formatDuration,
  loss: formatLoss,
  share: formatPercent,
};

test("pages and terminals write figures alike", () => {
  for (const [kind, examples] of Object.entries(examplesOfFormats)) {
    const texts = examples.map(([value]) => WRITERS[kind]!(value as number));
    expect(texts).toEqual(examples.map(([, text]) => text));
  }
});

test("formatAxisCount drops trailing zeros", () => {
  const values = [0, 100, 500, 1500, 50_000, 100_000, 2_000_000, 1_250_000];
  expect(values.map(formatAxisCount)).toEqual(
    ["0", "100", "500", "1.5 K", "50 K", "100 K", "2 M", "1.25 M"],
  );
});

test("formatAge selects the unit by the size", () => {
  const ages = [0, 12, 100, 7200, 200_000];
  expect(ages.map(formatAge)).toEqual(["now", "12 s", "2 min", "2 h", "2 d"]);
});

test("formatStepTime keeps the digits that distinguish two steps", () => {
  const seconds = [0, 0.0002, 0.0034, 0.085, 0.0996, 0.254, 1, 5.44, 61.2, 192, 5399, 5400, NaN];
  expect(seconds.map(formatStepTime)).toEqual([
    "0 ms", "<1 ms", "3 ms", "85 ms", "0.10 s", "0.25 s", "1.0 s", "5.4 s", "61.2 s", "3.2 min",
    "90.0 min", "1.5 h", "–",
  ]);
});

test("formatValue and formatAxisValue show values of every size", () => {
  expect([0, 6e-4, 0.75, 12.345, 12_345].map(formatValue)).toEqual(
    ["0", "6.00e-4", "0.750", "12.3", "12.3 K"],
  );
  expect([0, 6e-4, 0.1 + 0.2, 7.135, 20, 1_500].map(formatAxisValue)).toEqual(
    ["0", "6e-4", "0.3", "7.135", "20", "1.5 K"],
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
