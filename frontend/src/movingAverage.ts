// The line one reads off a noisy loss.

import type { Point } from "./types";

/** An exponential mean over tokens rather than over points: `scale` tokens back weigh 1/e, however dense they lie. */
export function smooth(points: Point[], scale: number): Point[] {
  let mean = 0;
  let weight = 0;
  let before = points[0]?.[0] ?? 0;
  return points.map(([tokens, value]) => {
    const kept = Math.exp(-(tokens - before) / Math.max(scale, 1));
    before = tokens;
    weight = weight * kept + 1;
    mean += (value - mean) / weight;
    return [tokens, mean];
  });
}

/** One x axis for several series, with gaps where a series has no point: what uPlot draws. */
export function align(...series: Point[][]): [number[], ...(number | null)[][]] {
  const xs = [...new Set(series.flatMap((points) => points.map((pair) => pair[0])))].sort((a, b) => a - b);
  const columns = series.map((points) => {
    const at = new Map(points);
    return xs.map((x) => at.get(x) ?? null);
  });
  return [xs, ...columns];
}
