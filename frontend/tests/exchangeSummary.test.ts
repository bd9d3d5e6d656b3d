import { describe, expect, test } from "vitest";
import type { ExchangeView } from "../src/types";
import {
  describeExchange,
  formatAgreement,
  formatPeers,
  formatUpload,
} from "../src/views/exchangeSummary";
import { createMachine } from "./messages";

const EXCHANGE: ExchangeView = {
  round_steps: 20,
  scheme: "top64x2",
  density: 0.015625,
  bits_per_parameter: 0.234375,
  sent_rate: 105_000,
  received_rate: 2_100_000,
  uplink_rate: 1_250_000,
  lag: 1,
  relayed: 0,
};

function describeWith(changes: Partial<ExchangeView>): Record<string, string> {
  return describeExchange({ ...createMachine("a"), exchange: { ...EXCHANGE, ...changes } });
}

describe("a machine's exchange", () => {
  test("before the first update is unknown", () => {
    const facts = describeExchange(createMachine("a"));
    expect([facts.round_steps, facts.scheme]).toEqual(["–", "–"]);
    expect(formatUpload(null)).toBe("–");
  });

  test("after an update is described in a few words", () => {
    expect(describeWith({})).toMatchObject({
      round_steps: "20 steps",
      scheme: "1.6 % of the values, 0.23 bits a parameter",
      traffic: "105 kB/s sent, 2.1 MB/s received",
    });
  });

  test("of one step a round and of all values is described in correct grammar", () => {
    const facts = describeWith({ round_steps: 1, bits_per_parameter: 8.0078, density: 1 });
    expect(facts.round_steps).toBe("1 step");
    expect(facts.scheme).toBe("All of the values, 8.0 bits a parameter");
    const { scheme } = describeWith({ density: 1, bits_per_parameter: 4 });
    expect(scheme).toBe("All of the values, 4.0 bits a parameter");
  });

  test("shows the share of the uplink where the uplink's rate is known", () => {
    expect(formatUpload(EXCHANGE)).toBe("105\u00a0kB/s · 8.4\u00a0%");
    expect(formatUpload({ ...EXCHANGE, uplink_rate: 0 })).toBe("105 kB/s");
  });
});

test("formatAgreement distinguishes identical, different and unknown weights", () => {
  expect([null, true, false].map(formatAgreement)).toEqual(["–", "Identical", "Differ"]);
});

describe("formatPeers", () => {
  const format = (aliveMachines: number, peers: number, alive = true) =>
    formatPeers({ ...createMachine("a"), peers, alive }, aliveMachines);

  test("distinguishes direct, relayed and missing connections", () => {
    expect([format(3, 2), format(3, 5)]).toEqual(["Direct", "Direct"]);
    expect(format(8, 2)).toBe("2 direct, 5 relayed");
    expect(format(3, 0)).toBe("Alone");
  });

  test("counts peers behind a relay server as relayed", () => {
    const exchange = { ...EXCHANGE, relayed: 1 };
    const machine = { ...createMachine("a"), peers: 2, alive: true, exchange };
    expect(formatPeers(machine, 3)).toBe("1 direct, 1 relayed");
  });

  test("of a machine without others, or that does not report, is unknown", () => {
    expect([format(1, 0), format(3, 2, false)]).toEqual(["–", "–"]);
  });
});
