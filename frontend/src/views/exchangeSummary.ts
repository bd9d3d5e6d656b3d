// How one machine exchanges its updates, in a few words. Pure.

import { formatBits, formatByteRate, formatInteger, formatPercent } from "../format";
import type { ExchangeView, Machine } from "../types";

const UNKNOWN = "–";
const NO_BREAK_SPACE = "\u00a0";

/** Format what a machine sends: "120 kB/s · 64 %", the second being the share of its uplink. */
export function formatUpload(exchange: ExchangeView | null): string {
  if (!exchange) return UNKNOWN;
  const rate = formatByteRate(exchange.sent_rate);
  if (exchange.uplink_rate <= 0) return rate;
  const share = formatPercent(exchange.sent_rate / exchange.uplink_rate);
  // A narrow cell breaks the line between the two, and not between a number and its unit.
  return [rate, share].map((part) => part.replaceAll(" ", NO_BREAK_SPACE)).join(" · ");
}

/**
 * Format how a machine reaches the other machines that report.
 *
 * It is connected to all of them ("Direct"), to some of them while the others are reached through
 * these ("2 direct, 5 relayed"), or to none ("Alone"). Updates travel through other machines, so
 * one connection is enough.
 */
export function formatPeers(machine: Machine, aliveMachines: number): string {
  const others = aliveMachines - 1;
  if (!machine.alive || others < 1) return UNKNOWN;
  if (machine.peers === 0) return "Alone";
  const direct = Math.max(0, machine.peers - (machine.exchange?.relayed ?? 0));
  if (direct >= others) return "Direct";
  return `${formatInteger(direct)} direct, ${formatInteger(others - direct)} relayed`;
}

/** Format whether weights agree with those of other machines; null if unknown. */
export function formatAgreement(agrees: boolean | null): string {
  if (agrees === null) return UNKNOWN;
  return agrees ? "Identical" : "Differ";
}

/** Describe a machine's exchange, by the names of the `data-fact` elements. */
export function describeExchange(machine: Machine): Record<string, string> {
  const sent = formatInteger(machine.updates_sent);
  const received = formatInteger(machine.updates_received);
  return {
    ...describeSettings(machine.exchange),
    updates: `${sent} sent, ${received} received`,
    peers: formatInteger(machine.peers),
    version: machine.version || UNKNOWN,
  };
}

function describeSettings(exchange: ExchangeView | null): Record<string, string> {
  if (!exchange) {
    return { round_steps: UNKNOWN, scheme: UNKNOWN, uplink_rate: UNKNOWN, traffic: UNKNOWN };
  }
  const steps = exchange.round_steps === 1 ? "step" : "steps";
  const density = exchange.density === 1 ? "All" : formatPercent(exchange.density);
  const sent = formatByteRate(exchange.sent_rate);
  const received = formatByteRate(exchange.received_rate);
  return {
    round_steps: `${formatInteger(exchange.round_steps)} ${steps}`,
    scheme: `${density} of the values, ${formatBits(exchange.bits_per_parameter)} a parameter`,
    uplink_rate: exchange.uplink_rate > 0 ? formatByteRate(exchange.uplink_rate) : UNKNOWN,
    traffic: `${sent} sent, ${received} received`,
  };
}
