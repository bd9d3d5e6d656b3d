// The units in which a loss can be shown. Pure.

import { formatLoss, formatValue } from "./format";
import type { Preferences } from "./preferences";

export type LossUnit = Preferences["lossUnit"];

/** How a loss in nats per token is shown. */
export interface LossScale {
  label: string;
  convert: (nats: number) => number;
  format: (value: number | undefined) => string;
}

/**
 * Create the scale of a unit.
 *
 * Perplexity is exp(loss). Bits per byte are comparable between tokenizers: loss / ln 2 · tokens /
 * bytes of the text.
 *
 * @param tokensPerByte - of the run's text; NaN if unknown, which makes bits per byte nats
 */
export function createLossScale(unit: LossUnit, tokensPerByte: number): LossScale {
  if (unit === "perplexity") {
    return { label: "Perplexity", convert: (nats) => Math.exp(nats), format: formatValue };
  }
  if (unit === "bits" && tokensPerByte > 0) {
    const bits = tokensPerByte / Math.LN2;
    return { label: "Bits per byte", convert: (nats) => nats * bits, format: formatLoss };
  }
  return { label: "Loss", convert: (nats) => nats, format: formatLoss };
}
