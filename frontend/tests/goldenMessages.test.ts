// The messages that the site promises, as files that both sides read: a test of the site compares
// what it sends to the same files.

import { expect, test } from "vitest";
import delta from "../../tests/contract/golden/live_delta.json";
import snapshot from "../../tests/contract/golden/live_snapshot.json";
import { Store } from "../src/store";
import type { Delta, Snapshot } from "../src/types";

test("the store applies the golden snapshot and the golden delta that follows it", () => {
  const store = new Store();
  const machine = "0192f0c1-2d3e-7f40-8a5b-000000000001";
  expect(store.applySnapshot(snapshot as unknown as Snapshot)).toBe("applied");
  expect(store.plans.get(machine)).toMatchObject({
    binding: "disk",
    predicted_seconds: 5.4,
    clipping: "exact",
  });

  expect(store.applyDelta(delta as unknown as Delta)).toBe("applied");
  expect(store.run).toMatchObject({
    name: "First barn",
    tokens: 71680,
    budget: 2000000,
    agree: true,
  });
  expect(store.workers.get(machine)).toMatchObject({
    updates_sent: 3,
    person: "Ada",
    step_seconds: 5.2,
    exchange: { scheme: "dense4", sent_rate: 118000, lag: 0 },
  });
  expect([...store.workers.values()].map(({ name }) => name)).toEqual(["workshop", "attic"]);
  expect(store.plans.get(machine)).toMatchObject({
    binding: "compute",
    predicted_seconds: 4.2,
    clipping: "layer",
  });
  expect(store.curves.train).toEqual([[20480, 4.5], [61440, 3.25], [71680, 3.125]]);
  expect(store.curves.validation.at(-1)).toEqual([71680, 3.375]);
  expect(store.curves.clock.map(([tokens]) => tokens)).toEqual([20480, 61440, 71680]);
  expect(store.events.map(({ kind, who }) => [kind, who])).toEqual(
    [["weights", "A checkpoint"], ["machine", "workshop"], ["run", "The site"]],
  );
});
