import { expect, test } from "vitest";
import { DEFAULTS, read } from "../src/preferences";

test("a choice comes back as it was kept", () => {
  const chosen = { ...DEFAULTS, across: "time", scale: "log", smoothing: "none", machines: true, comings: false };
  expect(read(JSON.stringify(chosen))).toEqual(chosen);
});

test.each([null, "", "nonsense", "null", "[]", "7", '"time"', '{"across": "sideways", "scale": true, "train": "no"}'])(
  "what makes no sense is as by default: %s",
  (kept) => expect(read(kept)).toEqual(DEFAULTS),
);

test("one nonsense leaves the other choices, and nothing unknown comes in", () => {
  expect(read('{"across": "steps", "smoothing": 3, "train": false, "more": true}')).toEqual(
    { ...DEFAULTS, across: "steps", train: false },
  );
});
