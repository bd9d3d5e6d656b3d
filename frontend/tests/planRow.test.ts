import { expect, test } from "vitest";
import { facts, predictedAndMeasured, shares } from "../src/views/planRow";
import { plan } from "./messages";

test("a machine without a plan shows a dash, and one that has not stepped yet only what it expects", () => {
  expect(predictedAndMeasured(undefined, 5)).toEqual(["–", "", false]);
  expect(predictedAndMeasured(plan(), null)).toEqual(["5.4 s / –", "", false]);
});

test("the measured step stands beside the predicted one, and is marked only beyond 15 %", () => {
  expect(predictedAndMeasured(plan(), 5.1)).toEqual(["5.4 s / 5.1 s", "−6 %", false]);
  expect(predictedAndMeasured(plan({ predicted_seconds: 1 }), 1.14)).toEqual(["1.0 s / 1.1 s", "+14 %", false]);
  expect(predictedAndMeasured(plan({ predicted_seconds: 1 }), 1.16)[2]).toBe(true);
  expect(predictedAndMeasured(plan({ predicted_seconds: 1 }), 0.84)).toEqual(["1.0 s / 0.84 s", "−16 %", true]);
});

test("a prediction of nothing is off by no percentage", () => {
  expect(predictedAndMeasured(plan({ predicted_seconds: 0 }), 1)).toEqual(["0 ms / 1.0 s", "", false]);
});

test("a plan is told in words", () => {
  expect(facts(plan(), 5.1)).toEqual({
    sentence: "The disk is what limits.", device_bytes: "0 MiB", host_bytes: "3.0 GiB", disk_bytes: "9.0 GiB",
    predicted: "5.4 s", measured: "5.1 s", binding: "The disk", device: "CPU", micro_batches: "4 × 1,024 tokens",
    groups: "12", resident: "3 of 50", clipping: "Exact, over all layers", written: "384.0 GiB",
    crash_safety: "Its unfinished step",
  });
  expect(facts(plan({ binding: "a queue" }), null).binding).toBe("a queue");
  const other = facts(plan({ disk_written_per_day: 0, binding: "", device: "NVIDIA H100" }), null);
  expect(other).toMatchObject({ written: "Nothing", binding: "–", device: "NVIDIA H100", measured: "–" });
});

test("the tiers share one bar", () => {
  expect(shares(plan())).toEqual({ device: 0, host: 0.25, disk: 0.75 });
  expect(shares(plan({ host_bytes: 0, disk_bytes: 0 }))).toEqual({ device: 0, host: 0, disk: 0 });
});
