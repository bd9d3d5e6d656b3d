import { describe, expect, test } from "vitest";
import { DEFAULTS, parsePreferences } from "../src/preferences";

describe("parsePreferences", () => {
  test("returns what was stored", () => {
    const stored = {
      ...DEFAULTS,
      xAxis: "time",
      yScale: "log",
      smoothing: 0.5,
      machineCurves: true,
      machineEvents: false,
    };
    expect(parsePreferences(JSON.stringify(stored))).toEqual(stored);
  });

  test.each([
    null,
    "",
    "nonsense",
    "null",
    "[]",
    "7",
    '"time"',
    '{"xAxis": "sideways", "yScale": true, "trainCurve": "no"}',
  ])("of %s returns the defaults", (stored) => {
    expect(parsePreferences(stored)).toEqual(DEFAULTS);
  });

  test("replaces only the values that are not allowed and ignores unknown names", () => {
    const stored = '{"xAxis": "steps", "smoothing": "some", "trainCurve": false, "more": true}';
    expect(parsePreferences(stored)).toEqual({ ...DEFAULTS, xAxis: "steps", trainCurve: false });
  });
});
