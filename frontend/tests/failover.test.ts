import { describe, expect, test } from "vitest";
import {
  FIRST_HOME_CHECK_MS,
  FIRST_RETRY_MS,
  LONGEST_HOME_CHECK_MS,
  LONGEST_RETRY_MS,
  MirrorSelector,
  parseMirrors,
} from "../src/failover";

const middle = () => 0.5; // in place of random numbers

describe("MirrorSelector", () => {
  test("selects the page's own mirror while it answers", () => {
    const selector = new MirrorSelector(3, middle);
    expect([selector.current, selector.isHome]).toEqual([0, true]);
    selector.markSuccess();
    expect(selector.current).toBe(0);
  });

  test("after failures tries all mirrors, and distributes pages evenly over them", () => {
    const secondMirrors: number[] = [];
    for (let page = 0; page < 400; page++) {
      const selector = new MirrorSelector(5);
      const tried = [selector.current];
      for (let i = 0; i < 4; i++) {
        selector.markFailed();
        tried.push(selector.current);
      }
      expect([...tried].sort()).toEqual([0, 1, 2, 3, 4]);
      secondMirrors.push(tried[1]!);
      selector.markFailed();
      expect(selector.isHome).toBe(true);
    }
    for (const mirror of [1, 2, 3, 4]) {
      expect(secondMirrors.filter((second) => second === mirror).length).toBeGreaterThan(50);
    }
  });

  test("spreads the retries of many pages over time", () => {
    const waits = Array.from({ length: 200 }, () => new MirrorSelector(2).markFailed());
    expect(Math.min(...waits)).toBeGreaterThanOrEqual(FIRST_RETRY_MS / 2);
    expect(Math.max(...waits)).toBeLessThanOrEqual(FIRST_RETRY_MS * 1.5);
    expect(Math.max(...waits) - Math.min(...waits)).toBeGreaterThan(FIRST_RETRY_MS / 2);
  });

  test("doubles the wait after each round of failures up to a limit", () => {
    const selector = new MirrorSelector(3, middle);
    const waits = Array.from({ length: 30 }, () => selector.markFailed());
    expect(waits.slice(0, 7)).toEqual([500, 500, 500, 1000, 1000, 1000, 2000]);
    expect(Math.max(...waits)).toBe(LONGEST_RETRY_MS);
    selector.markSuccess();
    expect(selector.markFailed()).toBe(FIRST_RETRY_MS);
  });

  test("checks an own mirror that fails repeatedly less and less often", () => {
    const selector = new MirrorSelector(2, middle);
    const delays: number[] = [];
    for (let i = 0; i < 8; i++) {
      selector.markFailed();
      delays.push(selector.homeCheckDelay());
      selector.returnHome();
      expect(selector.isHome).toBe(true);
    }
    expect(delays.slice(0, 3)).toEqual([
      FIRST_HOME_CHECK_MS,
      2 * FIRST_HOME_CHECK_MS,
      4 * FIRST_HOME_CHECK_MS,
    ]);
    expect(delays.at(-1)).toBe(LONGEST_HOME_CHECK_MS);
  });
});

describe("parseMirrors", () => {
  const parse = (mirrors?: string) =>
    parseMirrors({ dataset: { mirrors } } as unknown as HTMLElement);

  test("of a page without a list returns only its own mirror", () => {
    expect(parse()).toHaveLength(1);
    expect(parse("[]")[0]!.base).toBe("");
  });

  test("of a page with a list returns the mirrors in its order", () => {
    const base = "https://b.example.org";
    const other = { name: "B", base, page: `${base}/runs/1/` };
    expect(parse(JSON.stringify([{ ...other, base: "" }, other]))[1]).toEqual(other);
  });
});
