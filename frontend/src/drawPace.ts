// How often a page draws what changes: seldom enough that a slow device stays responsive. Pure.

export const FRAME_MS = 100; // by which a delta may come early
const MAX_PAGE_SHARE = 0.005; // of the main thread's time that drawing the page may take
const MAX_PAGE_MS = 5_000; // between two drawings of the page on the slowest device

const MAX_CHART_SHARE = 0.002; // of the main thread's time that one chart's new points may take
const MIN_CHART_MS = 4_000; // between two drawings of new points on a fast device
const MAX_CHART_MS = 15_000; // the same on the slowest device

/**
 * Return the least milliseconds between two drawings of the page if one takes `cost` milliseconds.
 *
 * Deltas come once a second. A device for which drawing each of them is too much work draws every
 * second to fifth of them, and stays responsive.
 */
export function findPageInterval(cost: number): number {
  return Math.min(MAX_PAGE_MS, cost / MAX_PAGE_SHARE) - FRAME_MS;
}

/**
 * Return the milliseconds between two drawings of a chart's new points.
 *
 * @param cost - milliseconds that the last ones took
 * @param pixelMs - milliseconds in which the curves become one pixel longer: a chart that shows a
 *   day changes less often than one that shows a minute
 */
export function findChartInterval(cost: number, pixelMs: number): number {
  return Math.min(MAX_CHART_MS, Math.max(MIN_CHART_MS, cost / MAX_CHART_SHARE, pixelMs));
}

/**
 * Return the milliseconds in which curves become one pixel longer.
 *
 * @param range - of the x axis that is shown, in its units
 * @param width - of the chart, in pixels
 * @param speed - by which the curves grow, in units of the x axis per second
 */
export function findPixelTime(range: number, width: number, speed: number): number {
  return speed > 0 && width > 0 ? (1000 * range) / width / speed : Infinity;
}
