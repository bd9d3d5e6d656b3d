// A plot with what every chart of a run has: the texts of its card, the buttons that save it, and
// the reader's preferences.

import type { ChartGroup } from "../chartGroup";
import { requireElement } from "../dom";
import type { PreferenceControls } from "../preferences";
import { Plot, type PlotParts } from "./plot";
import { enableSaveButtons } from "./saveButtons";

/** What differs between charts. */
export type CardPlotParts = Omit<PlotParts, "box" | "emptyText"> & {
  /** The chart's name in saved files. */
  title: () => string;
  /** The names of the x axis and of the curves, in the order of the plot's data. */
  names: () => string[];
  /** Called when the reader has changed preferences; draws the chart again if absent. */
  onPreferences?: () => void;
};

/** Create the plot of a chart's card. */
export function createCardPlot(
  card: HTMLElement,
  group: ChartGroup,
  preferences: PreferenceControls,
  parts: CardPlotParts,
): Plot {
  const plot = new Plot(
    {
      ...parts,
      box: requireElement(card, "[data-plot]"),
      emptyText: requireElement(card, "[data-empty]"),
    },
    group,
  );
  const { title, names } = parts;
  enableSaveButtons(card, { plot, title, names, xAxis: () => preferences.value.xAxis });
  preferences.onChange(() => {
    parts.onPreferences?.();
    plot.rebuild();
  });
  return plot;
}
