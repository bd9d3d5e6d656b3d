import { expect, test } from "vitest";
import { LineFeed, type LinesOutside } from "../src/lines";
import { Store } from "../src/store";
import type { Line } from "../src/types";
import { pen } from "../src/views/pens";

/** A site that answers when it is told to, and a clock that strikes when it is told to. */
class Outside implements LinesOutside {
  asked: { resolve: (lines: Line[]) => void; reject: (error: Error) => void }[] = [];
  timers = new Map<number, () => void>();
  private next = 1;

  fetch(): Promise<Line[]> {
    return new Promise((resolve, reject) => this.asked.push({ resolve, reject }));
  }

  later(_milliseconds: number, run: () => void): number {
    this.timers.set(this.next, run);
    return this.next++;
  }

  cancel(timer: number): void {
    this.timers.delete(timer);
  }

  strike(): void {
    const due = [...this.timers.values()];
    this.timers.clear();
    for (const run of due) run();
  }
}

const BARN: Line = { id: "a", name: "barn", points: [[1, 5]] };
const settled = () => new Promise((resolve) => setTimeout(resolve));

function feed(): { store: Store; outside: Outside; lines: LineFeed } {
  const [store, outside] = [new Store(), new Outside()];
  return { store, outside, lines: new LineFeed(store, outside) };
}

test("nothing is asked for until somebody wants to see it, and then again and again", async () => {
  const { store, outside, lines } = feed();
  lines.want(false);
  expect(outside.asked).toHaveLength(0);
  lines.want(true);
  lines.want(true);
  outside.asked[0]!.resolve([BARN]);
  await settled();
  expect(store.lines).toEqual([BARN]);
  outside.strike();
  expect(outside.asked).toHaveLength(2);
});

test("an answer that fails leaves what is there, and the next one is asked for", async () => {
  const { store, outside, lines } = feed();
  lines.want(true);
  outside.asked[0]!.resolve([BARN]);
  await settled();
  outside.strike();
  outside.asked[1]!.reject(new Error("gone"));
  await settled();
  expect(store.lines).toEqual([BARN]);
  expect(outside.timers.size).toBe(1);
});

test("who looks away is not told, and one timer runs whoever often they change their mind", async () => {
  const { store, outside, lines } = feed();
  lines.want(true);
  lines.want(false);
  outside.asked[0]!.resolve([BARN]);
  await settled();
  expect(store.lines).toEqual([]);
  expect(outside.timers.size).toBe(0);
  lines.want(true);
  lines.want(false);
  lines.want(true);
  for (const each of outside.asked) each.resolve([BARN]);
  await settled();
  expect(outside.timers.size).toBe(1);
});

test("of a dozen lines no two look the same", () => {
  const seen = Array.from({ length: 12 }, (_, i) => JSON.stringify(pen(i)));
  expect(new Set(seen).size).toBe(12);
});
