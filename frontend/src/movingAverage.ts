// The smoothed curves of the charts, their common x axis, and the range of their y axis. Pure.

import type { Point } from "./types";

export const DEFAULT_SMOOTHING = 0.92;
const SMOOTHING_STEPS = 1000; // steps of the weight in the whole range of a curve
const MIN_POINTS_WITH_OUTLIERS = 20; // of fewer points none counts as an outlier
const OUTLIER_SHARE = 0.04; // of the points at each end that the y axis may leave out
const OUTLIER_FACTOR = 1.5; // by which they must widen the range to be left out
const MAX_SORTED = 600; // points that suffice to find the range

/**
 * Smooth a curve by an exponential moving average.
 *
 * The weight of a point decays with its distance, not with the number of points in between:
 * `scale` back it is 1/e. Early values are corrected for the missing history, as in Adam (Kingma
 * and Ba 2015, section 3).
 */
export function smoothPoints(points: Point[], scale: number): Point[] {
  let mean = 0;
  let weight = 0;
  let previousX = points[0]?.[0] ?? 0;
  return points.map(([x, value]) => {
    const decay = Math.exp(-(x - previousX) / Math.max(scale, 1e-9));
    previousX = x;
    weight = weight * decay + 1;
    mean += (value - mean) / weight;
    return [x, mean];
  });
}

/**
 * Return how far back the smoothing looks, in units of x.
 *
 * @param weight - what remains of a point's weight after 1/1000 of the curve's range, 0 to 1
 */
export function smoothingScale(points: Point[], weight = DEFAULT_SMOOTHING): number {
  if (weight <= 0) return 0;
  const range = (points.at(-1)?.[0] ?? 0) - (points[0]?.[0] ?? 0);
  return range / SMOOTHING_STEPS / -Math.log(Math.min(weight, 0.9999));
}

/**
 * Put curves on one x axis, as uPlot needs them; null where a curve has no point.
 *
 * Each curve ascends in x.
 */
export function alignCurves(...curves: Point[][]): [number[], ...(number | null)[][]] {
  const axis: number[] = [];
  const columns: (number | null)[][] = curves.map(() => []);
  const places = curves.map(() => 0);
  for (;;) {
    let x = Infinity;
    for (let i = 0; i < curves.length; i++) {
      const point = curves[i]![places[i]!];
      if (point && point[0] < x) x = point[0];
    }
    if (x === Infinity) return [axis, ...columns];
    axis.push(x);
    for (let i = 0; i < curves.length; i++) {
      const point = curves[i]![places[i]!];
      const isHere = point !== undefined && point[0] === x;
      columns[i]!.push(isHere ? point[1] : null);
      if (isHere) places[i]!++;
    }
  }
}

/** Return the lowest and highest value, without a few far outliers; null without values. */
export function findRange(values: number[], ignoresOutliers: boolean): [number, number] | null {
  const finite = values.filter((value) => Number.isFinite(value));
  if (!finite.length) return null;
  const sorted = sampleValues(finite).sort((a, b) => a - b);
  const low = finite.reduce((a, b) => Math.min(a, b));
  const high = finite.reduce((a, b) => Math.max(a, b));
  if (!ignoresOutliers || sorted.length < MIN_POINTS_WITH_OUTLIERS) return [low, high];
  const cut = Math.max(1, Math.floor(sorted.length * OUTLIER_SHARE));
  const inner = [sorted[cut]!, sorted.at(-1 - cut)!] as const;
  const limit = OUTLIER_FACTOR * (inner[1] - inner[0]);
  return high - low > limit ? [inner[0], inner[1]] : [low, high];
}

/** Return at most MAX_SORTED of the values, evenly chosen. */
function sampleValues(values: number[]): number[] {
  const stride = Math.ceil(values.length / MAX_SORTED);
  return stride <= 1 ? [...values] : values.filter((_, i) => i % stride === 0);
}
