// Which mirror the page uses: its own, or another one while that does not answer.
// Pure, except for random numbers.

/** A mirror that can serve the page's live data. */
export interface Mirror {
  name: string;
  /** The start of its addresses, without a slash at the end; "" for the page's own mirror. */
  base: string;
  /** The address of this page on that mirror. */
  page: string;
}

export const FIRST_RETRY_MS = 500; // until the next mirror is tried; doubles after each full round
export const LONGEST_RETRY_MS = 15_000; // at which the doubling ends, before a random factor
export const FIRST_HOME_CHECK_MS = 30_000; // until the own mirror is checked; doubles if it fails
export const LONGEST_HOME_CHECK_MS = 300_000; // at which the doubling ends, before a random factor

/** List the mirrors that the page names, its own first; only its own if there is no list. */
export function parseMirrors(page: HTMLElement): Mirror[] {
  const mirrors = JSON.parse(page.dataset.mirrors || "[]") as Mirror[];
  return mirrors.length ? mirrors : [{ name: "", base: "", page: "" }];
}

/** Selects the mirror to use, and decides how long to wait before the next attempt. */
export class MirrorSelector {
  private readonly order: number[]; // the page's own mirror, then the others in random order
  private position = 0; // in `order`
  private consecutiveFailures = 0; // of any mirror
  private homeFailures = 0; // failures of the page's own mirror

  /**
   * Create a selector that starts at the page's own mirror.
   *
   * @param mirrorCount - number of mirrors; 0 is the index of the page's own mirror
   * @param random - returns a number in [0, 1)
   */
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

  /** The index of the mirror to use. */
  get current(): number {
    return this.order[this.position]!;
  }

  /** Whether the page uses its own mirror. */
  get isHome(): boolean {
    return this.position === 0;
  }

  /** Select the next mirror, and return the milliseconds to wait before trying it. */
  markFailed(): number {
    const fullRounds = Math.floor(this.consecutiveFailures / this.order.length);
    this.consecutiveFailures++;
    if (this.isHome && this.order.length > 1) this.homeFailures++;
    this.position = (this.position + 1) % this.order.length;
    return this.addJitter(Math.min(LONGEST_RETRY_MS, FIRST_RETRY_MS * 2 ** fullRounds));
  }

  /** Record that the current mirror answers, so that the next wait is short again. */
  markSuccess(): void {
    this.consecutiveFailures = 0;
  }

  /** Return the milliseconds until the own mirror is checked, while another one is in use. */
  homeCheckDelay(): number {
    const doublings = Math.max(0, this.homeFailures - 1);
    return this.addJitter(Math.min(LONGEST_HOME_CHECK_MS, FIRST_HOME_CHECK_MS * 2 ** doublings));
  }

  /** Select the page's own mirror again. */
  returnHome(): void {
    this.position = 0;
  }

  /** Multiply by a random factor in [0.5, 1.5), so that pages do not retry at the same moment. */
  private addJitter(milliseconds: number): number {
    return milliseconds * (0.5 + this.random());
  }
}
