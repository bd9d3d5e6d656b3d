import { describe, expect, test } from "vitest";
import { MirrorSelector, FIRST_RETRY_MS, LONGEST_HOME_CHECK_MS, LONGEST_RETRY_MS, FIRST_HOME_CHECK_MS, parseMirrors } from "../src/failover";

/** Random numbers that the test chooses. */
function dice(...throws: number[]): () => number {
  let next = 0;
  return () => throws[next++ % throws.length]!;
}

describe("the selector", () => {
  test("selects the page's own mirror while it answers", () => {
    const selector = new MirrorSelector(3, dice(0.5));
    expect([selector.current, selector.isHome]).toEqual([0, true]);
    selector.markSuccess();
    expect(selector.current).toBe(0);
  });

  test("spreads the pages of a failed mirror evenly, and each tries all mirrors", () => {
    const seconds: number[] = [];
    for (let page = 0; page < 400; page++) {
      const selector = new MirrorSelector(5);
      const seen = [selector.current];
      for (let i = 0; i < 4; i++) {
        selector.markFailed();
        seen.push(selector.current);
      }
      expect([...seen].sort()).toEqual([0, 1, 2, 3, 4]);
      seconds.push(seen[1]!);
      selector.markFailed();
      expect(selector.isHome).toBe(true);
    }
    for (const mirror of [1, 2, 3, 4]) expect(seconds.filter((each) => each === mirror).length).toBeGreaterThan(50);
  });

  test("spreads retries over time", () => {
    const waits = Array.from({ length: 200 }, () => new MirrorSelector(2).markFailed());
    expect(Math.min(...waits)).toBeGreaterThanOrEqual(FIRST_RETRY_MS / 2);
    expect(Math.max(...waits)).toBeLessThanOrEqual(FIRST_RETRY_MS * 1.5);
    expect(Math.max(...waits) - Math.min(...waits)).toBeGreaterThan(FIRST_RETRY_MS / 2);
  });

  test("doubles the wait after each round of failures, up to a limit", () => {
    const selector = new MirrorSelector(3, dice(0.5));
    const waits = Array.from({ length: 30 }, () => selector.markFailed());
    expect(waits.slice(0, 7)).toEqual([500, 500, 500, 1000, 1000, 1000, 2000]);
    expect(Math.max(...waits)).toBe(LONGEST_RETRY_MS);
    selector.markSuccess();
    expect(selector.markFailed()).toBe(FIRST_RETRY_MS);
  });

  test("checks a mirror that fails repeatedly less and less often", () => {
    const selector = new MirrorSelector(2, dice(0.5));
    const looks: number[] = [];
    for (let i = 0; i < 8; i++) {
      selector.markFailed();
      looks.push(selector.homeCheckDelay());
      selector.returnHome();
      expect(selector.isHome).toBe(true);
    }
    expect(looks.slice(0, 3)).toEqual([FIRST_HOME_CHECK_MS, 2 * FIRST_HOME_CHECK_MS, 4 * FIRST_HOME_CHECK_MS]);
    expect(looks.at(-1)).toBe(LONGEST_HOME_CHECK_MS);
  });
});

test("a page without a list of mirrors uses only its own", () => {
  const page = (mirrors?: string) => ({ dataset: { mirrors } }) as unknown as HTMLElement;
  expect(parseMirrors(page())).toHaveLength(1);
  expect(parseMirrors(page("[]"))[0]!.base).toBe("");
  const other = { name: "B", base: "https://b.example.org", page: "https://b.example.org/runs/1/" };
  expect(parseMirrors(page(JSON.stringify([{ ...other, base: "" }, other])))[1]).toEqual(other);
});
