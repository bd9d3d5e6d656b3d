// The controls of all charts together: the number next to the smoothing slider, the end of a zoom,
// and the link to the view.

import type { ChartGroup } from "../chartGroup";
import { formatView } from "../chartExport";
import { writeToClipboard } from "../copyButtons";
import { requireElement, setText } from "../dom";
import type { PreferenceControls } from "../preferences";

const CONFIRMATION_MS = 2_000;

/** Wires the toolbar above the charts. */
export class ChartToolbar {
  private readonly smoothing: HTMLElement;
  private readonly reset: HTMLButtonElement;
  private readonly share: HTMLButtonElement;

  constructor(
    toolbar: HTMLElement,
    private readonly preferences: PreferenceControls,
    private readonly group: ChartGroup,
  ) {
    this.smoothing = requireElement(toolbar, "[data-smoothing-number]");
    this.reset = requireElement(toolbar, "[data-reset-zoom]");
    this.share = requireElement(toolbar, "[data-share-view]");
    this.reset.addEventListener("click", () => group.zoomTo(null));
    this.share.addEventListener("click", () => void this.copyLink());
    group.onZoom(() => this.update());
    preferences.onChange(() => this.update());
    this.update();
  }

  private update(): void {
    setText(this.smoothing, this.preferences.value.smoothing.toFixed(2));
    this.reset.disabled = this.group.zoom === null;
  }

  /** Put the view into the page's address, and copy that. */
  private async copyLink(): Promise<void> {
    history.replaceState(null, "", formatView(this.preferences.value, this.group.zoom));
    const label = this.share.dataset.label ?? this.share.textContent ?? "";
    this.share.dataset.label = label;
    const isCopied = await writeToClipboard(location.href);
    this.share.textContent = isCopied ? "Copied" : "In the address";
    window.setTimeout(() => (this.share.textContent = label), CONFIRMATION_MS);
  }
}
