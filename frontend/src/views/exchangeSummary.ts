// How one machine trades its updates, in a few words.

import { bits, percent, speed, whole } from "../format";
import type { ExchangeView, Machine } from "../types";

function round(exchange: ExchangeView | null): string {
  return exchange ? `${whole(exchange.round_steps)} ${exchange.round_steps === 1 ? "step" : "steps"}` : "–";
}

/** "120 kB/s · 64 %", of what its line carries. */
export function line(exchange: ExchangeView | null): string {
  if (!exchange) return "–";
  const share = exchange.uplink_rate > 0 ? ` · ${percent(exchange.sent_rate / exchange.uplink_rate)}` : "";
  return speed(exchange.sent_rate) + share;
}

/** How a machine reaches the others that are there: "Direct" to all of them, to some with the rest relayed by those, or
 *  not at all. Updates travel through third machines, so that one link is enough. */
export function reach(worker: Machine, alive: number): string {
  const others = alive - 1;
  if (!worker.alive || others < 1) return "–";
  if (worker.peers === 0) return "Alone";
  return worker.peers >= others ? "Direct" : `${whole(worker.peers)} direct, ${whole(others - worker.peers)} relayed`;
}

export function weights(worker: Machine): string {
  return worker.agrees === null ? "–" : worker.agrees ? "Identical" : "Differ";
}

/** By the name of the place that shows each. */
export function exchangeFacts(worker: Machine): Record<string, string> {
  const { exchange } = worker;
  return {
    round: round(exchange),
    update: exchange ? `${share(exchange.density)} of the values, ${bits(exchange.bits_per_parameter)} a parameter` : "–",
    uplink: exchange && exchange.uplink_rate > 0 ? speed(exchange.uplink_rate) : "–",
    traffic: exchange ? `${speed(exchange.sent_rate)} sent, ${speed(exchange.received_rate)} received` : "–",
    updates: `${whole(worker.updates_sent)} sent, ${whole(worker.updates_received)} received`,
    peers: whole(worker.peers),
    version: worker.version || "–",
  };
}

function share(density: number): string {
  return density === 1 ? "All" : percent(density);
}
