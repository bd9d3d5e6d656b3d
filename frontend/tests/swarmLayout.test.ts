import { describe, expect, test } from "vitest";
import { findPlace, findWidth, formatRoute, listRows, summarizeSwarm } from "../src/swarmLayout";
import type { Swarm, SwarmLink } from "../src/types";

const node = (id: string) => ({ id, name: id, person: "Ada", rate: 1, agrees: null });
const link = (source: string, target: string, forward = 0, backward = 0): SwarmLink => {
  return { source, target, forward, backward, agrees: true, relayed: false };
};
const SWARM: Swarm = {
  nodes: [node("a"), node("b"), node("c")],
  links: [link("a", "b", 2000, 1000)],
  hidden: 0,
};

test("findPlace spreads machines over the circle, each at a place of its own", () => {
  const angles = Array.from({ length: 64 }, (_, i) => findPlace(i).angle).sort((a, b) => a - b);
  angles.forEach((angle, i) => expect(angle).toBeCloseTo(i / 64, 12));
  expect([0, 1, 2, 3].map((i) => findPlace(i).angle)).toEqual([0, 0.5, 0.25, 0.75]);
});

test("findWidth grows with the traffic and has a limit", () => {
  const widths = [0, 1e3, 1e5, 1e7, 1e12].map((rate) => findWidth(link("a", "b", rate)));
  expect(widths).toEqual([...widths].sort((a, b) => a - b));
  expect([widths[0], widths.at(-1)]).toEqual([1, 7]);
});

test("listRows has each connection from both ends, and machines without one", () => {
  const rows = listRows(SWARM).map(({ machine, peer, sent }) => [machine.id, peer?.id, sent]);
  expect(rows).toEqual([["a", "b", 2000], ["b", "a", 1000], ["c", undefined, 0]]);
});

describe("summarizeSwarm", () => {
  test("counts pairs and traffic", () => {
    expect(summarizeSwarm(SWARM)).toBe(
      "3 machines, 1 of 3 pairs connected, 3 kB/s between them." +
        " Updates reach the others through these.",
    );
    expect(summarizeSwarm({ ...SWARM, hidden: 5 })).toContain("5 more machines");
    const relayed = SWARM.links.map((present) => ({ ...present, relayed: true }));
    expect(summarizeSwarm({ ...SWARM, links: relayed })).toContain(
      "1 of 3 pairs connected, 1 of them through a relay server,",
    );
    expect(summarizeSwarm({ ...SWARM, links: [] })).toBe(
      "3 machines, 0 of 3 pairs connected, 0 kB/s between them.",
    );
    expect([true, false, null].map(formatRoute)).toEqual(["Relay", "Direct", "–"]);
  });

  test("of no or one machine has a sentence of its own", () => {
    expect(summarizeSwarm({ nodes: [], links: [], hidden: 0 })).toBe("No machine reports now.");
    expect(summarizeSwarm({ nodes: [node("a")], links: [], hidden: 0 })).toContain("One machine");
  });
});
