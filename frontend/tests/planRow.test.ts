import { describe, expect, test } from "vitest";
import { compareStepTimes, computeTierShares, describePlan, describeSeat } from "../src/views/planRow";
import { createPlan } from "./messages";

describe("compareStepTimes", () => {
  test("without a plan shows a dash", () => {
    expect(compareStepTimes(undefined, 5)).toEqual({ text: "–", deviation: "", isLarge: false });
  });

  test("before the first step shows only the prediction", () => {
    const comparison = compareStepTimes(createPlan(), null);
    expect(comparison).toEqual({ text: "5.4 s / –", deviation: "", isLarge: false });
  });

  test("says how it compares, which is large from half as long again", () => {
    expect(compareStepTimes(createPlan(), 5.1)).toEqual({
      text: "5.4 s / 5.1 s",
      deviation: "as planned",
      isLarge: false,
    });
    const plan = createPlan({ predicted_seconds: 1 });
    expect(compareStepTimes(plan, 1.14)).toEqual({
      text: "1.0 s / 1.1 s",
      deviation: "as planned",
      isLarge: false,
    });
    expect(compareStepTimes(plan, 1.3).deviation).toBe("30 % longer");
    expect(compareStepTimes(plan, 4.38)).toMatchObject({
      deviation: "4.4 times as long",
      isLarge: true,
    });
    expect(compareStepTimes(plan, 0.84)).toEqual({
      text: "1.0 s / 0.84 s",
      deviation: "16 % shorter",
      isLarge: false,
    });
  });

  test("with a prediction of zero shows no deviation", () => {
    const comparison = compareStepTimes(createPlan({ predicted_seconds: 0 }), 1);
    expect(comparison).toEqual({ text: "0 ms / 1.0 s", deviation: "", isLarge: false });
  });
});

describe("describePlan", () => {
  test("returns every fact in words", () => {
    expect(describePlan(createPlan(), 5.1)).toEqual({
      sentence: "The disk is what limits.",
      device: "CPU",
      device_bytes: "0 kB",
      host_bytes: "3.2 GB",
      disk_bytes: "9.7 GB",
      predicted_seconds: "5.4 s",
      step_seconds: "5.1 s",
      deviation: "As planned",
      binding: "The disk",
      micro_batches: "4 × 1,024 tokens",
      groups: "12",
      resident: "3 of 50",
      clipping: "Exact, over all layers",
      disk_written_per_day: "412.3 GB",
      crash_safety: "Its unfinished step",
    });
  });

  test("explains a machine that is faster than its plan", () => {
    const { deviation } = describePlan(createPlan({ predicted_seconds: 2 }), 1);
    expect(deviation).toBe("Faster than planned: the machine is faster than when it was measured");
  });

  test("with an unknown bottleneck shows the name that was sent", () => {
    expect(describePlan(createPlan({ binding: "a queue" }), null).binding).toBe("a queue");
  });

  test("with absent values shows dashes", () => {
    const plan = createPlan({ disk_written_per_day: 0, binding: "", device: "NVIDIA H100" });
    expect(describePlan(plan, null)).toMatchObject({
      disk_written_per_day: "Nothing",
      binding: "–",
      device: "NVIDIA H100",
      step_seconds: "–",
    });
  });
});

test("computeTierShares divides the bytes between the tiers", () => {
  expect(computeTierShares(createPlan())).toEqual({ device: 0, host: 0.25, disk: 0.75 });
  const empty = createPlan({ host_bytes: 0, disk_bytes: 0 });
  expect(computeTierShares(empty)).toEqual({ device: 0, host: 0, disk: 0 });
});

test("describeSeat names the blocks, the share and a machine that is not connected", () => {
  const seat = { name: "attic", first_block: 3, blocks: 3, share: 0.38, connected: true };
  expect(describeSeat(seat)).toBe("Blocks 3 to 5, 38 % of the work");
  expect(describeSeat({ ...seat, blocks: 1, connected: false })).toBe(
    "Block 3, 38 % of the work, not connected",
  );
});
