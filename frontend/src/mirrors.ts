// Which mirror the page asks: its own, and another one while that does not answer. Pure but for its dice.

export interface Mirror {
  name: string;
  /** Of its addresses, without a slash at the end; "" for the page's own. */
  base: string;
  /** This very page there. */
  page: string;
}

export const FIRST_WAIT = 500; // ms until the next mirror is tried, doubling with every round of them…
export const LONGEST_WAIT = 15_000;
export const LOOK_HOME = 30_000; // ms until the page's own mirror is looked after, doubling each time it went…
export const LONGEST_AWAY = 300_000;

/** All mirrors that a page knows, its own first; that one alone where there is no list. */
export function mirrorsOf(page: HTMLElement): Mirror[] {
  const told = JSON.parse(page.dataset.mirrors || "[]") as Mirror[];
  return told.length ? told : [{ name: "", base: "", page: "" }];
}

export class Choice {
  private readonly order: number[];
  private turn = 0;
  private failures = 0; // in a row, of whichever
  private departures = 0;

  /** `many`: mirrors that may be asked; 0 is the page's own. Pages go on to the others in different orders. */
  constructor(
    many: number,
    private readonly chance: () => number = Math.random,
  ) {
    const others = Array.from({ length: many - 1 }, (_, i) => i + 1);
    for (let i = others.length - 1; i > 0; i--) {
      const j = Math.floor(chance() * (i + 1));
      [others[i], others[j]] = [others[j]!, others[i]!];
    }
    this.order = [0, ...others];
  }

  /** The mirror to ask. */
  get at(): number {
    return this.order[this.turn]!;
  }

  get home(): boolean {
    return this.turn === 0;
  }

  /** It does not answer: the next one's turn, in so many ms. */
  failed(): number {
    const rounds = Math.floor(this.failures++ / this.order.length);
    if (this.home && this.order.length > 1) this.departures++;
    this.turn = (this.turn + 1) % this.order.length;
    return Math.min(LONGEST_WAIT, FIRST_WAIT * 2 ** rounds) * (0.5 + this.chance());
  }

  answered(): void {
    this.failures = 0;
  }

  /** In how many ms the page's own mirror is looked after, from elsewhere. */
  lookHome(): number {
    return Math.min(LONGEST_AWAY, LOOK_HOME * 2 ** Math.max(0, this.departures - 1)) * (0.5 + this.chance());
  }

  goHome(): void {
    this.turn = 0;
  }
}
