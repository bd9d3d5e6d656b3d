// The places of machines in the drawing of a swarm, and the texts about their connections. Pure.

import { formatByteRate } from "./format";
import type { Swarm, SwarmLink, SwarmNode } from "./types";

export const SIZE = 400; // of the drawing in its units
const RADIUS = 115; // of the circle on which the machines stand
const MIN_WIDTH = 1; // of a line
const MAX_WIDTH = 7;
const FULL_RATE = 10e6; // bytes per second at which a line has its greatest width

/** A place in the drawing; `angle` in turns, clockwise from the top. */
export interface Place {
  x: number;
  y: number;
  angle: number;
}

/**
 * Return the place of the machine that joined as number `index`.
 *
 * The places follow the van der Corput sequence: each halves a gap, so a machine that joins moves no
 * other one, and the machines are always spread well.
 */
export function findPlace(index: number): Place {
  let angle = 0;
  let part = 0.5;
  for (let rest = index; rest > 0; rest >>= 1) {
    if (rest & 1) angle += part;
    part /= 2;
  }
  const radians = 2 * Math.PI * angle;
  return {
    x: SIZE / 2 + RADIUS * Math.sin(radians),
    y: SIZE / 2 - RADIUS * Math.cos(radians),
    angle,
  };
}

/** Return how wide a connection's line is: it grows with the logarithm of its traffic. */
export function findWidth({ forward, backward }: SwarmLink): number {
  const share = Math.log1p((forward + backward) / 1000) / Math.log1p(FULL_RATE / 1000);
  return MIN_WIDTH + (MAX_WIDTH - MIN_WIDTH) * Math.min(1, share);
}

/** Return how two machines are connected; null: unknown. */
export function formatRoute(relayed: boolean | null): string {
  if (relayed === null) return "–";
  return relayed ? "Relay" : "Direct";
}

/** Summarize the connections in a sentence. */
export function summarizeSwarm({ nodes, links, hidden }: Swarm): string {
  const count = nodes.length;
  if (count === 0) return "No machine reports now.";
  if (count === 1) return "One machine reports: it has nobody to connect to.";
  const pairs = (count * (count - 1)) / 2;
  const rate = links.reduce((sum, link) => sum + link.forward + link.backward, 0);
  const through = links.length > 0 && links.length < pairs ? " Updates reach the others through these." : "";
  const relayed = links.filter((link) => link.relayed).length;
  const byRelay = relayed ? `, ${relayed} of them through a relay server` : "";
  const more = hidden > 0 ? ` ${hidden} more machines are not drawn.` : "";
  return (
    `${count} machines, ${links.length} of ${pairs} pairs connected${byRelay}, ` +
    `${formatByteRate(rate)} between them.${through}${more}`
  );
}

/** One row of the table: a machine and one that it is connected to. */
export interface SwarmRow {
  machine: SwarmNode;
  peer: SwarmNode | null; // null: it is connected to none
  sent: number;
  received: number;
  agrees: boolean | null;
  relayed: boolean | null;
}

/** List the connections of each machine, in the order of the machines. */
export function listRows({ nodes, links }: Swarm): SwarmRow[] {
  const byId = new Map(nodes.map((node) => [node.id, node]));
  return nodes.flatMap((machine): SwarmRow[] => {
    const rows = links.flatMap((link): SwarmRow[] => {
      const isSource = link.source === machine.id;
      const peer = byId.get(isSource ? link.target : link.source);
      if (!peer || (!isSource && link.target !== machine.id)) return [];
      const [sent, received] = isSource
        ? [link.forward, link.backward]
        : [link.backward, link.forward];
      const { agrees, relayed } = link;
      return [{ machine, peer, sent, received, agrees, relayed }];
    });
    if (rows.length) return rows;
    return [{ machine, peer: null, sent: 0, received: 0, agrees: null, relayed: null }];
  });
}
