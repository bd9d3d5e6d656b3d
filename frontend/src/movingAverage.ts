// The smoothed curves of the loss chart, and their common x axis. Pure.

import type { Point } from "./types";

/**
 * Smooth a curve by an exponential moving average over tokens.
 *
 * The weight of a point decays with its distance in tokens, not with the number of points in
 * between: `scale` tokens back it is 1/e. Early values are corrected for the missing history, as
 * in Adam (Kingma and Ba 2015, section 3).
 */
export function smoothPoints(points: Point[], scale: number): Point[] {
  let mean = 0;
  let weight = 0;
  let previousTokens = points[0]?.[0] ?? 0;
  return points.map(([tokens, value]) => {
    const decay = Math.exp(-(tokens - previousTokens) / Math.max(scale, 1));
    previousTokens = tokens;
    weight = weight * decay + 1;
    mean += (value - mean) / weight;
    return [tokens, mean];
  });
}

/**
 * Return how many tokens the smoothing looks back.
 *
 * It is the range of three points, but at least 1/80 and at most 1/30 of the whole curve.
 */
export function smoothingScale(points: Point[]): number {
  const range = (points.at(-1)?.[0] ?? 0) - (points[0]?.[0] ?? 0);
  return range * Math.min(1 / 30, Math.max(1 / 80, 3 / points.length));
}

/** Return the last loss of the smoothed curve; undefined without points. */
export function lastSmoothedLoss(points: Point[]): number | undefined {
  return smoothPoints(points, smoothingScale(points)).at(-1)?.[1];
}

/** Put several curves on one x axis, as uPlot needs them; null where a curve has no point. */
export function alignCurves(...curves: Point[][]): [number[], ...(number | null)[][]] {
  const xs = new Set(curves.flatMap((points) => points.map(([x]) => x)));
  const axis = [...xs].sort((a, b) => a - b);
  const columns = curves.map((points) => {
    const valueAt = new Map(points);
    return axis.map((x) => valueAt.get(x) ?? null);
  });
  return [axis, ...columns];
}
