import { expect, test } from "vitest";

import { line, reach, exchangeFacts, weights } from "../src/views/exchangeSummary";
import { worker } from "./messages";

const EXCHANGE = {
  round_steps: 20, scheme: "top64x2", density: 0.015625, bits_per_parameter: 0.234375, sent_rate: 105_000, received_rate: 2_100_000,
  uplink_rate: 1_250_000, lag: 1,
};

test("a machine that has published nothing yet has nothing to say of it", () => {
  expect(line(null)).toBe("–");
  expect([exchangeFacts(worker("a")).round, exchangeFacts(worker("a")).update]).toEqual(["–", "–"]);
});

test("rounds, bits and the share of the line are said in a few words", () => {
  const once = { ...worker("a"), exchange: { ...EXCHANGE, round_steps: 1, bits_per_parameter: 8.0078, density: 1 } };
  expect([exchangeFacts(once).round, exchangeFacts(once).update]).toEqual(["1 step", "All of the values, 8.0 bits a parameter"]);
  expect(line(EXCHANGE)).toBe("105 kB/s · 8.4 %");
  expect(line({ ...EXCHANGE, uplink_rate: 0 })).toBe("105 kB/s");
  const facts = exchangeFacts({ ...worker("a"), exchange: EXCHANGE });
  expect(facts.round).toBe("20 steps");
  expect(facts.update).toBe("1.6 % of the values, 0.23 bits a parameter");
  expect(facts.traffic).toBe("105 kB/s sent, 2.1 MB/s received");
  expect(exchangeFacts({ ...worker("a"), exchange: { ...EXCHANGE, density: 1, bits_per_parameter: 4 } }).update).toBe("All of the values, 4.0 bits a parameter");
});

test("weights are identical, or differ, or have nothing to be compared with", () => {
  expect([null, true, false].map((agrees) => weights({ ...worker("a"), agrees }))).toEqual(["–", "Identical", "Differ"]);
});

test("a machine is linked to the others directly, through some of them, or not at all", () => {
  const seen = (alive: number, peers: number, here = true) => reach({ ...worker("a"), peers, alive: here }, alive);
  expect([seen(3, 2), seen(3, 5), seen(8, 2), seen(3, 0)]).toEqual(["Direct", "Direct", "2 direct, 5 relayed", "Alone"]);
  expect([seen(1, 0), seen(3, 2, false)]).toEqual(["–", "–"]);
});
