import { expect, test } from "vitest";
import type { Point, WorkerCurve } from "../src/types";
import { stackRates } from "../src/stackedRates";

const machine = (id: string, rates: Point[]): WorkerCurve => ({ id, name: id, points: [], rates });

test("stackRates stacks the machines, and what they do not account for", () => {
  const total: Point[] = [[0, 10], [10, 12], [20, 20]];
  const layers = stackRates(total, [
    machine("a", [[0, 4], [10, 6], [20, 8]]),
    machine("b", [[0, 6], [10, 6]]),
  ]);
  expect(layers.map(({ name }) => name)).toEqual(["Others", "b", "a"]);
  expect(layers[2]!.tops).toEqual([[0, 4], [10, 6], [20, 8]]);
  expect(layers[1]!.tops).toEqual([[0, 10], [10, 12], [20, 14]]);
  expect(layers[0]!.tops).toEqual(total);
});

test("stackRates without measured machines has no layers", () => {
  expect(stackRates([[0, 10]], [machine("a", [])])).toEqual([]);
  expect(stackRates([], [machine("a", [[0, 1]])])).toEqual([]);
});
