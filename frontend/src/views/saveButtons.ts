// The buttons of a chart that save its values or its drawing.

import type { XAxis } from "../chartAxes";
import { fileName, formatCsv, saveFile } from "../chartExport";
import type { Plot } from "./plot";

/** What a chart saves. */
export interface SavedChart {
  plot: Plot;
  title: () => string;
  xAxis: () => XAxis;
  /** The names of the x axis and of the curves, in the order of the plot's data. */
  names: () => string[];
}

/** Let the buttons with `data-save` in a chart's card save it as CSV or PNG. */
export function enableSaveButtons(card: HTMLElement, chart: SavedChart): void {
  const name = () => fileName(document.title.split(" · ")[0]!, chart.title());
  for (const button of card.querySelectorAll<HTMLButtonElement>("[data-save]")) {
    button.addEventListener("click", () => {
      if (button.dataset.save === "csv") {
        const table = { names: chart.names(), columns: chart.plot.data };
        const text = formatCsv(table, chart.xAxis());
        saveFile(`${name()}.csv`, new Blob([text], { type: "text/csv" }));
      } else {
        const image = chart.plot.drawImage(`${chart.title()} · ${document.title}`);
        image?.toBlob((blob) => blob && saveFile(`${name()}.png`, blob));
      }
      button.closest("details")?.removeAttribute("open");
    });
  }
}
