// The drawing of a barn that shows a run's progress: the more of the token budget is spent, the
// more of its timbers are raised.

import { formatPercent } from "../format";
import type { Store } from "../store";

/** Raises the timbers of the barn on a run's page. */
export class Barn {
  private readonly timbers: SVGElement[]; // in the order of raising
  private shown = "";

  constructor(private readonly drawing: Element) {
    this.timbers = [...drawing.querySelectorAll<SVGElement>("[data-timber]")].sort(
      (a, b) => Number(a.dataset.timber) - Number(b.dataset.timber),
    );
  }

  draw(store: Store): void {
    if (!store.run) return;
    const share = Math.min(1, store.run.tokens / store.run.budget);
    const raised = countRaised(share, this.timbers.length);
    const state = `${raised} ${formatPercent(share)}`;
    if (state === this.shown) return;
    this.shown = state;
    this.timbers.forEach((timber, i) => timber.classList.toggle("is-raised", i < raised));
    this.drawing.setAttribute("aria-label", `A timber frame, ${formatPercent(share)} raised`);
  }
}

/**
 * Count the raised timbers: the first from the first token on, all only at the end.
 *
 * The server has the same formula (svg_art.count_raised).
 */
export function countRaised(share: number, timbers: number): number {
  if (share <= 0) return 0;
  if (share >= 1) return timbers;
  return Math.min(timbers - 1, 1 + Math.floor(share * (timbers - 1)));
}
