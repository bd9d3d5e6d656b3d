import { expect, test } from "vitest";
import { formatElapsed, formatStatus } from "../src/views/runFigures";
import { createSnapshot } from "./messages";

test("formatElapsed ends with the run", () => {
  const { run } = createSnapshot(0);
  expect(formatElapsed({ ...run, started: null }, 5000)).toBe("–");
  expect(formatElapsed({ ...run, started: 1000, ended: null }, 1060)).toBe("60 s");
  expect(formatElapsed({ ...run, started: 1000, ended: 1080 }, 9000)).toBe("80 s");
  expect(formatElapsed({ ...run, started: 1000, ended: null }, 900)).toBe("0 s");
});

test("formatStatus names a draft whose launch is requested", () => {
  expect(formatStatus("draft", false)).toBe("Draft");
  expect(formatStatus("draft", true)).toBe("Launching");
  expect(formatStatus("training", true)).toBe("Training");
});
