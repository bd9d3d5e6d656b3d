// Select the mirror that the page uses: its own, or another one while that does not answer. Pure but for random numbers.

export interface Mirror {
  name: string;
  /** The start of its addresses, without a slash at the end; "" for the page's own. */
  base: string;
  /** The address of this page on that mirror. */
  page: string;
}

export const FIRST_RETRY_MS = 500; // until the next mirror is tried; doubles after each round of all mirrors
export const LONGEST_RETRY_MS = 15_000; // at which the doubling ends, before a random factor
export const FIRST_HOME_CHECK_MS = 30_000; // until the page's own mirror is checked; doubles each time it fails
export const LONGEST_HOME_CHECK_MS = 300_000; // at which the doubling ends, before a random factor

/** List the mirrors that the page names, its own first; only its own if there is no list. */
export function parseMirrors(page: HTMLElement): Mirror[] {
  const listed = JSON.parse(page.dataset.mirrors || "[]") as Mirror[];
  return listed.length ? listed : [{ name: "", base: "", page: "" }];
}

export class MirrorSelector {
  private readonly order: number[];
  private turn = 0;
  private failures = 0; // in a row, of any mirror
  private departures = 0; // how often the page's own mirror failed

  /** `mirrorCount`: mirrors to choose from; 0 is the page's own. Each page tries the others in a random order. */
  constructor(
    mirrorCount: number,
    private readonly random: () => number = Math.random,
  ) {
    const others = Array.from({ length: mirrorCount - 1 }, (_, i) => i + 1);
    for (let i = others.length - 1; i > 0; i--) {
      const j = Math.floor(random() * (i + 1));
      [others[i], others[j]] = [others[j]!, others[i]!];
    }
    this.order = [0, ...others];
  }

  /** The number of the mirror to use. */
  get current(): number {
    return this.order[this.turn]!;
  }

  get isHome(): boolean {
    return this.turn === 0;
  }

  /** Select the next mirror because this one failed, and return the milliseconds to wait before trying it. */
  markFailed(): number {
    const rounds = Math.floor(this.failures++ / this.order.length);
    if (this.isHome && this.order.length > 1) this.departures++;
    this.turn = (this.turn + 1) % this.order.length;
    return Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** rounds) * (0.5 + this.random());
  }

  markSuccess(): void {
    this.failures = 0;
  }

  /** Return the milliseconds until the page's own mirror is checked, while another one is in use. */
  homeCheckDelay(): number {
    return Math.min(LONGEST_HOME_CHECK_MS, FIRST_HOME_CHECK_MS * 2 ** Math.max(0, this.departures - 1)) * (0.5 + this.random());
  }

  returnHome(): void {
    this.turn = 0;
  }
}
