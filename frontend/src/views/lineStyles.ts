// The styles of the machines' curves: a colour and a dash pattern each, so that readers can
// distinguish them without colours. Pure.

const COLOURS = ["--machine-0", "--machine-1", "--machine-2"] as const;
const DASH_PATTERNS: readonly (readonly number[])[] = [[], [7, 4], [2, 3], [9, 3, 2, 3]];

/** How one machine's curve is drawn. */
export interface LineStyle {
  /** The custom property with its colour. */
  colour: (typeof COLOURS)[number];
  /** Lengths of dashes and gaps in pixels; empty for a solid line. */
  dash: number[];
}

/** Return the style of the curve with this index: the first twelve are all different. */
export function lineStyle(index: number): LineStyle {
  const cycle = Math.floor(index / DASH_PATTERNS.length);
  return {
    colour: COLOURS[(index + cycle) % COLOURS.length]!,
    dash: [...DASH_PATTERNS[index % DASH_PATTERNS.length]!],
  };
}
