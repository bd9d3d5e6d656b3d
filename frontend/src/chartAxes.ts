// The x axes of the charts: tokens, steps of one machine, time of day, or time spent training.
// Curves over tokens and curves over time can both be drawn on each axis. Pure.

import type { Point } from "./types";

export type XAxis = "tokens" | "steps" | "time" | "active";

/** How positions on an x axis follow from tokens and from times in seconds since 1970. */
export interface XMapping {
  fromTokens(tokens: number): number;
  fromTime(seconds: number): number;
}

const PAUSE_INTERVALS = 4; // a gap of so many usual intervals between two points is a pause
const GAPS_AROUND = 3; // on each side of a gap, whose median is the usual interval there
const MIN_PAUSE_SHARE = 0.25; // of a pause that a curve's own gap must cover to be one

type Mapping = (
  axis: XAxis,
  stepTokens: number,
  clock: Point[],
  rate?: Point[],
) => XMapping;

/**
 * Create the mappings onto an x axis. They never decrease: clocks of machines that differ and late
 * reports therefore do not make a curve run backwards.
 *
 * @param stepTokens - tokens of one step of one machine
 * @param clock - [tokens, seconds since 1970], ascending in tokens
 * @param rate - [seconds since 1970, tokens per second], ascending
 */
export const createXMapping: Mapping = rememberLast((axis, stepTokens, clock, rate = []) => {
  const times = makeTimesAscend(clock);
  const timeAt = (tokens: number) => interpolate(times, tokens);
  switch (axis) {
    case "tokens":
    case "steps": {
      const divisor = axis === "steps" ? Math.max(1, stepTokens) : 1;
      const tokensByTime = swapCoordinates(times);
      return {
        fromTokens: divisor === 1 ? keepX : (tokens) => tokens / divisor,
        fromTime: (seconds) => interpolate(tokensByTime, seconds) / divisor,
      };
    }
    case "time":
      return { fromTokens: timeAt, fromTime: keepX };
    case "active": {
      const elapsed = countActiveSeconds(rate.length > 1 ? rate : swapCoordinates(times));
      const activeAt = (seconds: number) => interpolate(elapsed, seconds);
      return { fromTokens: (tokens) => activeAt(timeAt(tokens)), fromTime: activeAt };
    }
  }
});

/** Return how fast a run moves on along an x axis, in its units per second. */
export function findAxisSpeed(
  axis: XAxis,
  stepTokens: number,
  tokensPerSecond: number,
): number {
  if (axis === "tokens") return tokensPerSecond;
  return axis === "steps" ? tokensPerSecond / Math.max(1, stepTokens) : 1;
}

/** Leave a position as it is. */
function keepX(x: number): number {
  return x;
}

/** Return the last result again for the same arguments: all charts of a page need the same one. */
function rememberLast(create: Mapping): Mapping {
  let last: Parameters<Mapping> | null = null;
  let result: XMapping;
  return (...values) => {
    const isSame = last?.length === values.length && values.every((value, i) => value === last![i]);
    if (!isSame) result = create(...values);
    last = values;
    return result;
  };
}

/**
 * Count the seconds of training up to each point of a curve over time: pauses do not count.
 *
 * A pause is a longer gap than usual between two points, or an interval in which both are 0.
 */
export function countActiveSeconds(points: Point[]): Point[] {
  const gaps = points.slice(1).map(([time], i) => time - points[i]![0]);
  const usual = findMedian(gaps);
  let active = 0;
  return points.map(([time, value], i) => {
    const previous = points[i - 1];
    if (previous && (value > 0 || previous[1] > 0)) {
      const gap = time - previous[0];
      active += gap > PAUSE_INTERVALS * usual ? usual : gap;
    }
    return [time, active];
  });
}

/**
 * Find where a curve over time pauses: from one point to the next, if that is farther away than is
 * usual there.
 *
 * Older points are farther apart than newer ones, so only the intervals around a gap count.
 *
 * @param times - the positions of the curve's points, ascending
 */
export function findPauses(times: number[]): [number, number][] {
  const gaps = times.slice(1).map((time, i) => time - times[i]!);
  const pauses: [number, number][] = [];
  gaps.forEach((gap, i) => {
    const usual = findMedian(gaps.slice(Math.max(0, i - GAPS_AROUND), i + GAPS_AROUND + 1));
    if (gap > PAUSE_INTERVALS * usual) pauses.push([times[i]!, times[i + 1]!]);
  });
  return pauses;
}

/**
 * Find when nobody trained.
 *
 * Losses come at irregular times, so their own gaps say little; speeds come at regular ones.
 *
 * @param rate - [seconds since 1970, tokens per second], ascending
 */
export function findTrainingPauses(rate: Point[]): [number, number][] {
  let pauses = knownPauses.get(rate);
  if (!pauses) {
    pauses = findPauses(rate.filter(([, speed]) => speed > 0).map(([time]) => time));
    knownPauses.set(rate, pauses);
  }
  return pauses;
}

// Every curve of every chart asks for the pauses of the same speeds, which never change.
const knownPauses = new WeakMap<Point[], [number, number][]>();

/**
 * Find the gaps of a curve that lie in pauses.
 *
 * A gap counts if most of it lies in one pause and it is not much shorter than that: a machine
 * that trained on while the site was away has points there, and its curve goes on.
 *
 * @param times - the positions of the curve's points, ascending
 * @param pauses - ascending
 */
export function findGapsInPauses(
  times: number[],
  pauses: [number, number][],
): [number, number][] {
  const gaps: [number, number][] = [];
  let next = 0;
  for (let i = 1; i < times.length && next < pauses.length; i++) {
    const [from, to] = [times[i - 1]!, times[i]!];
    while (next < pauses.length && pauses[next]![1] <= from) next++;
    const pause = pauses[next];
    if (!pause) break;
    const shared = Math.min(to, pause[1]) - Math.max(from, pause[0]);
    const isInside = shared >= (to - from) / 2;
    if (isInside && shared >= MIN_PAUSE_SHARE * (pause[1] - pause[0])) gaps.push([from, to]);
  }
  return gaps;
}

/** Return the upper median; 0 without values. */
function findMedian(values: number[]): number {
  return [...values].sort((a, b) => a - b)[values.length >> 1] ?? 0;
}

/** Replace each time by the latest one up to its point. */
function makeTimesAscend(clock: Point[]): Point[] {
  let latest = -Infinity;
  return clock.map(([tokens, time]) => {
    latest = Math.max(latest, time);
    return [tokens, latest];
  });
}

/** Swap x and y; of the points with the same new x, keep the last. */
function swapCoordinates(points: Point[]): Point[] {
  return mapPoints(points.map(([x, y]) => [y, x]), (x) => x);
}

/** Interpolate linearly between the points around `x`; outside of them use the nearest. */
function interpolate(points: Point[], x: number): number {
  const next = findFirstAfter(points, x);
  const before = points[next - 1];
  const after = points[next];
  if (!before) return after?.[1] ?? 0;
  if (!after) return before[1];
  const fraction = (x - before[0]) / (after[0] - before[0]);
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

/** Map the x of each point; of neighbours that get the same x, keep the last. */
export function mapPoints(points: Point[], mapX: (x: number) => number): Point[] {
  if (mapX === keepX) return points;
  const mapped: Point[] = [];
  for (const [x, y] of points) {
    const position = mapX(x);
    if (mapped.at(-1)?.[0] === position) mapped.pop();
    mapped.push([position, y]);
  }
  return mapped;
}
