import { describe, expect, test } from "vitest";
import { fileName, formatCsv, formatView, parseView } from "../src/chartExport";
import { DEFAULTS } from "../src/preferences";

describe("formatCsv", () => {
  test("has a column for each curve and an empty cell where it has no point", () => {
    const table = { names: ["Tokens", "Training"], columns: [[1, 2], [4.5, null]] };
    expect(formatCsv(table, "tokens")).toBe("Tokens,Training\r\n1,4.5\r\n2,\r\n");
  });

  test("writes times in ISO 8601", () => {
    const table = { names: ["Time", "Rate"], columns: [[0], [7]] };
    expect(formatCsv(table, "time")).toContain("1970-01-01T00:00:00.000Z,7");
  });

  test("names of machines can neither break a row nor run as a formula", () => {
    const table = { names: ["Tokens", '=HYPERLINK("x")', 'a,"b"\n'], columns: [[1], [2], [3]] };
    const [head] = formatCsv(table, "tokens").split("\r\n");
    expect(head).toBe(`Tokens,"'=HYPERLINK(""x"")","a,""b""\n"`);
  });
});

describe("a link to a view", () => {
  test("contains what the reader has selected", () => {
    const preferences = { ...DEFAULTS, xAxis: "active", smoothing: 0.4, trainCurve: false } as const;
    const view = parseView(formatView(preferences, [12.5, 99]));
    expect({ ...DEFAULTS, ...view.values }).toEqual(preferences);
    expect(view.zoom).toEqual([12.5, 99]);
  });

  test.each(["", "#checkpoints", "#x=sideways&smooth=7&from=9&to=2", "#from=a&to=b", "#smooth="])(
    "%s selects nothing",
    (fragment) => {
      expect(parseView(fragment)).toEqual({ values: {}, zoom: null });
    },
  );
});

test("fileName has only letters, digits and hyphens", () => {
  expect(fileName("Café “Übung”", "Tokens/s")).toBe("cafe-ubung-tokens-s");
  expect(fileName("🌾")).toBe("chart");
});
