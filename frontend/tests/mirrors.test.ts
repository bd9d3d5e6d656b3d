import { describe, expect, test } from "vitest";
import { Choice, FIRST_WAIT, LONGEST_AWAY, LONGEST_WAIT, LOOK_HOME, mirrorsOf } from "../src/mirrors";

/** Dice that are thrown beforehand. */
function dice(...throws: number[]): () => number {
  let next = 0;
  return () => throws[next++ % throws.length]!;
}

describe("which mirror is asked", () => {
  test("is the page's own as long as it answers", () => {
    const choice = new Choice(3, dice(0.5));
    expect([choice.at, choice.home]).toEqual([0, true]);
    choice.answered();
    expect(choice.at).toBe(0);
  });

  test("pages of a mirror that dies go on to the others evenly, and each to all of them", () => {
    const seconds: number[] = [];
    for (let page = 0; page < 400; page++) {
      const choice = new Choice(5);
      const seen = [choice.at];
      for (let i = 0; i < 4; i++) {
        choice.failed();
        seen.push(choice.at);
      }
      expect([...seen].sort()).toEqual([0, 1, 2, 3, 4]);
      seconds.push(seen[1]!);
      choice.failed();
      expect(choice.home).toBe(true);
    }
    for (const mirror of [1, 2, 3, 4]) expect(seconds.filter((each) => each === mirror).length).toBeGreaterThan(50);
  });

  test("they do not come all at once", () => {
    const waits = Array.from({ length: 200 }, () => new Choice(2).failed());
    expect(Math.min(...waits)).toBeGreaterThanOrEqual(FIRST_WAIT / 2);
    expect(Math.max(...waits)).toBeLessThanOrEqual(FIRST_WAIT * 1.5);
    expect(Math.max(...waits) - Math.min(...waits)).toBeGreaterThan(FIRST_WAIT / 2);
  });

  test("where none answers each round of them waits longer, and not for ever", () => {
    const choice = new Choice(3, dice(0.5));
    const waits = Array.from({ length: 30 }, () => choice.failed());
    expect(waits.slice(0, 7)).toEqual([500, 500, 500, 1000, 1000, 1000, 2000]);
    expect(Math.max(...waits)).toBe(LONGEST_WAIT);
    choice.answered();
    expect(choice.failed()).toBe(FIRST_WAIT);
  });

  test("one that keeps going away is looked after ever later", () => {
    const choice = new Choice(2, dice(0.5));
    const looks: number[] = [];
    for (let i = 0; i < 8; i++) {
      choice.failed();
      looks.push(choice.lookHome());
      choice.goHome();
      expect(choice.home).toBe(true);
    }
    expect(looks.slice(0, 3)).toEqual([LOOK_HOME, 2 * LOOK_HOME, 4 * LOOK_HOME]);
    expect(looks.at(-1)).toBe(LONGEST_AWAY);
  });
});

test("a page without a list knows its own site alone", () => {
  const page = (mirrors?: string) => ({ dataset: { mirrors } }) as unknown as HTMLElement;
  expect(mirrorsOf(page())).toHaveLength(1);
  expect(mirrorsOf(page("[]"))[0]!.base).toBe("");
  const other = { name: "B", base: "https://b.example.org", page: "https://b.example.org/runs/1/" };
  expect(mirrorsOf(page(JSON.stringify([{ ...other, base: "" }, other])))[1]).toEqual(other);
});
