// Along what a loss is drawn: the ledger's tokens, steps of so many tokens, or the time when the ledger held them.

import type { Point } from "./types";

export type XAxis = "tokens" | "steps" | "time";

/** Where so many ledger tokens lie. `stepTokens`: of one step of one machine. `clock`: as the store has it. Never
 *  decreases, whatever the clock says: machines' clocks and reports that come late do not fold the line. */
export function across(kind: XAxis, stepTokens: number, clock: Point[]): (tokens: number) => number {
  if (kind === "tokens") return (tokens) => tokens;
  if (kind === "steps") return (tokens) => tokens / Math.max(1, stepTokens);
  const known = rising(clock);
  return (tokens) => timeAt(known, tokens);
}

function rising(clock: Point[]): Point[] {
  let latest = -Infinity;
  return clock.map(([tokens, at]) => [tokens, (latest = Math.max(latest, at))]);
}

/** Between two known places as the crow flies; outside of them at the nearest. */
function timeAt(known: Point[], tokens: number): number {
  const next = firstAfter(known, tokens);
  const [before, after] = [known[next - 1], known[next]];
  if (!before) return after?.[1] ?? 0;
  if (!after) return before[1];
  return before[1] + ((tokens - before[0]) / (after[0] - before[0])) * (after[1] - before[1]);
}

/** The index of the first point past these tokens. */
export function firstAfter(points: Point[], tokens: number): number {
  let [low, high] = [0, points.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle]![0] <= tokens) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Points moved to where they lie; of those that come to lie at one place the last stays. */
export function laid(points: Point[], place: (tokens: number) => number): Point[] {
  return [...new Map(points.map(([tokens, value]) => [place(tokens), value] as const))];
}
