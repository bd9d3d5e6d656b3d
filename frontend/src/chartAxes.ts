// The x axes of the loss chart: the ledger's tokens, steps of one machine, or time. Pure.

import type { Point } from "./types";

export type XAxis = "tokens" | "steps" | "time";

/**
 * Create the function that maps ledger tokens to a position on an x axis.
 *
 * The mapping never decreases. Clocks of machines that differ and late reports therefore do not
 * make a curve run backwards.
 *
 * @param stepTokens - tokens of one step of one machine
 * @param clock - [ledger tokens, seconds since 1970], ascending in tokens
 */
export function createXMapping(
  axis: XAxis,
  stepTokens: number,
  clock: Point[],
): (tokens: number) => number {
  switch (axis) {
    case "tokens":
      return (tokens) => tokens;
    case "steps":
      return (tokens) => tokens / Math.max(1, stepTokens);
    case "time": {
      const ascending = makeTimesAscend(clock);
      return (tokens) => interpolateTime(ascending, tokens);
    }
  }
}

/** Replace each time by the latest one up to its point. */
function makeTimesAscend(clock: Point[]): Point[] {
  let latest = -Infinity;
  return clock.map(([tokens, time]) => {
    latest = Math.max(latest, time);
    return [tokens, latest];
  });
}

/** Interpolate linearly between the points around `tokens`; outside of them use the nearest. */
function interpolateTime(clock: Point[], tokens: number): number {
  const next = findFirstAfter(clock, tokens);
  const before = clock[next - 1];
  const after = clock[next];
  if (!before) return after?.[1] ?? 0;
  if (!after) return before[1];
  const fraction = (tokens - before[0]) / (after[0] - before[0]);
  return before[1] + fraction * (after[1] - before[1]);
}

/** Return the index of the first point whose x is greater than `x`, by binary search. */
export function findFirstAfter(points: Point[], x: number): number {
  let low = 0;
  let high = points.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (points[middle]![0] <= x) low = middle + 1;
    else high = middle;
  }
  return low;
}

/** Map the x of each point; of the points that get the same x, keep the last. */
export function mapPoints(points: Point[], mapX: (tokens: number) => number): Point[] {
  return [...new Map(points.map(([tokens, value]) => [mapX(tokens), value] as const))];
}
