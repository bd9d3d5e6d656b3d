// The barn: one timber is raised for every so many tokens of the budget.

import { percent } from "../format";
import type { Store } from "../store";

export class Barn {
  private readonly members: SVGElement[];

  constructor(private readonly place: Element) {
    this.members = [...place.querySelectorAll<SVGElement>("[data-member]")].sort(
      (a, b) => Number(a.dataset.member) - Number(b.dataset.member),
    );
  }

  draw(store: Store): void {
    if (!store.run) return;
    const share = Math.min(1, store.run.tokens / store.run.budget);
    const raised = raisedAt(share, this.members.length);
    this.members.forEach((member, i) => member.classList.toggle("is-raised", i < raised));
    this.place.setAttribute("aria-label", `A timber frame, ${percent(share)} raised`);
  }
}

/** The first timber stands as soon as there is a token, the last one only when the budget is spent. */
export function raisedAt(share: number, members: number): number {
  if (share <= 0) return 0;
  return share >= 1 ? members : Math.min(members - 1, 1 + Math.floor(share * (members - 1)));
}
