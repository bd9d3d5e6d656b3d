import { beforeEach, describe, expect, test } from "vitest";
import { MirrorSelector, FIRST_HOME_CHECK_MS } from "../src/failover";
import { LiveFeed, type ConnectionStatus, type Environment, GAP_WAIT_MS, RefusedError, SILENCE_MS, type Socket } from "../src/socket";
import { Store } from "../src/store";
import type { Delta, Snapshot } from "../src/types";
import { delta, snapshot } from "./messages";

/** A site in memory: its sockets, its snapshots, and a clock that moves when told. */
class Site implements Environment {
  sockets: (Socket & { closed: boolean; mirror: number })[] = [];
  asked: { mirror: number; give: (frame: Snapshot) => void; fail: (error: Error) => void }[] = [];
  now = 0;
  private timers = new Map<number, { at: number; run: () => void }>();
  private next = 1;

  open(mirror: number): Socket {
    const wire = { mirror, onopen: null, onmessage: null, onclose: null, closed: false, close() { this.closed = true; } };
    this.sockets.push(wire);
    return wire;
  }
  snapshot(mirror: number): Promise<Snapshot> {
    return new Promise((give, fail) => this.asked.push({ mirror, give, fail }));
  }
  later(milliseconds: number, run: () => void): number {
    this.timers.set(this.next, { at: this.now + milliseconds, run });
    return this.next++;
  }
  cancel(timer: number): void {
    this.timers.delete(timer);
  }
  random(): number {
    return 0.5;
  }
  get last(): Socket & { closed: boolean; mirror: number } {
    return this.sockets.at(-1)!;
  }
  say(frame: Delta): void {
    this.last.onmessage?.({ data: JSON.stringify(frame) });
  }
  async give(frame: Snapshot): Promise<void> {
    this.asked.at(-1)!.give(frame);
    await settled();
  }
  pass(milliseconds: number): void {
    this.now += milliseconds;
    for (const [id, timer] of [...this.timers].sort((a, b) => a[1].at - b[1].at))
      if (timer.at <= this.now && this.timers.delete(id)) timer.run();
  }
}

const settled = () => new Promise((done) => setTimeout(done, 0));

let site: Site, store: Store, feed: LiveFeed, links: ConnectionStatus[];

beforeEach(() => {
  [site, store, links] = [new Site(), new Store(), []];
  feed = new LiveFeed(store, site, (link) => links.push(link));
  feed.start();
});

async function live(seq = 10): Promise<void> {
  site.last.onopen?.();
  await site.give(snapshot(seq));
}

describe("the feed", () => {
  test("fetches the snapshot only once the socket is open, so that nothing falls between", async () => {
    expect(site.asked).toHaveLength(0);
    site.last.onopen?.();
    site.say(delta(11, { run: { tokens: 11 } }));
    site.say(delta(12, { run: { tokens: 12 } }));
    await site.give(snapshot(11));
    expect(store.seq).toBe(12);
    expect(store.run?.tokens).toBe(12);
    expect(links).toEqual(["live"]);
  });

  test("closes a gap with a fresh snapshot", async () => {
    await live();
    site.say(delta(12));
    expect(site.asked).toHaveLength(1);
    site.pass(GAP_WAIT_MS);
    expect(site.asked).toHaveLength(2);
    await site.give(snapshot(12));
    site.say(delta(13, { run: { tokens: 13 } }));
    expect(store.run?.tokens).toBe(13);
    expect(links).toEqual(["live"]);
  });

  test("spares the snapshot when the missing delta was only overtaken", async () => {
    await live();
    site.say(delta(12));
    site.say(delta(11));
    site.pass(GAP_WAIT_MS * 2);
    expect(store.seq).toBe(12);
    expect(site.asked).toHaveLength(1);
  });

  test("asks again when the snapshot it got ends before the deltas it holds", async () => {
    await live();
    site.say(delta(20));
    site.pass(GAP_WAIT_MS);
    await site.give(snapshot(15));
    site.pass(GAP_WAIT_MS);
    expect(site.asked).toHaveLength(3);
    await site.give(snapshot(20));
    expect(store.hasGap).toBe(false);
  });

  test("says that it reconnects, comes back by itself, and starts from a snapshot", async () => {
    await live();
    site.last.onclose?.({ code: 1006 });
    expect(links).toEqual(["live", "reconnecting"]);
    site.pass(500);
    expect(site.sockets).toHaveLength(2);
    await live(40);
    expect(links).toEqual(["live", "reconnecting", "live"]);
    expect(store.seq).toBe(40);
  });

  test("waits longer after every failure, and not for ever", () => {
    const waits: number[] = [];
    for (let i = 0; i < 9; i++) {
      site.last.onclose?.({ code: 1006 });
      const before = site.sockets.length;
      let waited = 0;
      while (site.sockets.length === before) {
        site.pass(100);
        waited += 100;
      }
      waits.push(waited);
    }
    expect(waits.slice(0, 4)).toEqual([500, 1000, 2000, 4000]);
    expect(Math.max(...waits)).toBe(15_000);
  });

  test("a failed snapshot is a failed connection", async () => {
    site.last.onopen?.();
    site.asked[0]!.fail(new Error("503"));
    await settled();
    expect(links).toEqual(["reconnecting"]);
    expect(site.last.closed).toBe(true);
    site.pass(500);
    expect(site.sockets).toHaveLength(2);
  });

  test("takes silence for a dead link", async () => {
    await live();
    site.pass(SILENCE_MS - 1);
    site.say(delta(11));
    site.pass(SILENCE_MS - 1);
    expect(feed.status).toBe("live");
    site.pass(1);
    expect(feed.status).toBe("reconnecting");
  });

  test("a snapshot from a connection that broke meanwhile is not shown", async () => {
    site.last.onopen?.();
    const late = site.asked[0]!;
    site.last.onclose?.({ code: 1006 });
    site.pass(500);
    late.give(snapshot(3));
    await settled();
    expect(store.run).toBeNull();
    expect(feed.status).toBe("reconnecting");
  });

  test("frames of an old socket are not heard any more", async () => {
    await live();
    const old = site.last;
    const hear = old.onmessage;
    old.onclose?.({ code: 1006 });
    site.pass(500);
    await live(20);
    hear?.({ data: JSON.stringify(delta(21, { run: { tokens: 666 } })) });
    expect(store.run?.tokens).toBe(1000);
  });

  test("gives up where it is refused", async () => {
    site.last.onclose?.({ code: 4403 });
    site.pass(60_000);
    expect(links).toEqual(["refused"]);
    expect(site.sockets).toHaveLength(1);
  });

  test("gives up where the snapshot is refused", async () => {
    site.last.onopen?.();
    site.asked[0]!.fail(new RefusedError("not found"));
    await settled();
    site.pass(60_000);
    expect(links).toEqual(["refused"]);
    expect(site.sockets).toHaveLength(1);
  });

  test("a nudge ends the wait, and does nothing while all is well", async () => {
    await live();
    feed.retryNow();
    expect(site.sockets).toHaveLength(1);
    site.last.onclose?.({ code: 1006 });
    feed.retryNow();
    expect(site.sockets).toHaveLength(2);
  });

  test("a stopped feed stays silent", async () => {
    await live();
    feed.stop();
    site.pass(60_000);
    expect(site.sockets).toHaveLength(1);
    expect(site.last.closed).toBe(true);
  });
});

describe("the feed where there are other mirrors", () => {
  let told: [ConnectionStatus, number][];

  beforeEach(() => {
    [site, store, told] = [new Site(), new Store(), []];
    feed = new LiveFeed(store, site, (link, at) => told.push([link, at]), new MirrorSelector(2, () => 0.5));
    feed.start();
  });

  test("goes on at another one, from its snapshot and by its numbers, and says which", async () => {
    await live(1000);
    site.last.onclose?.({ code: 1006 });
    site.pass(500);
    expect(site.last.mirror).toBe(1);
    site.last.onopen?.();
    site.say(delta(8, { run: { tokens: 2222 }, train: [[300, 3]] }));
    expect(site.asked.at(-1)!.mirror).toBe(1);
    expect(store.run?.tokens).toBe(1000); // what was seen stays until then
    await site.give(snapshot(7, { now: 1, train: [[100, 5], [200, 4]] }));
    expect(store.seq).toBe(8);
    expect(store.run?.tokens).toBe(2222);
    expect(store.series.train).toEqual([[100, 5], [200, 4], [300, 3]]);
    expect(told).toEqual([["live", 0], ["reconnecting", 0], ["live", 1]]);
  });

  test("tries them in turn, each round later", () => {
    const mirrors: number[] = [];
    for (let i = 0; i < 5; i++) {
      mirrors.push(site.last.mirror);
      site.last.onclose?.({ code: 1006 });
      site.pass(500 * 2 ** Math.floor(i / 2));
    }
    expect(mirrors).toEqual([0, 1, 0, 1, 0]);
  });

  test("comes back once its own answers again, and what is shown stays meanwhile", async () => {
    await live(1000);
    site.last.onclose?.({ code: 1006 });
    site.pass(500);
    await live(7);
    let seq = 7;
    const hear = (milliseconds: number) => {
      for (let i = 0; i < milliseconds; i += 10_000) {
        site.pass(10_000);
        site.say(delta(++seq));
      }
    };
    hear(FIRST_HOME_CHECK_MS);
    expect(site.asked.at(-1)!.mirror).toBe(0);
    site.asked.at(-1)!.fail(new Error("still gone"));
    await settled();
    expect(site.last.mirror).toBe(1);
    hear(FIRST_HOME_CHECK_MS);
    expect(told.at(-1)).toEqual(["live", 1]);
    await site.give(snapshot(2000));
    expect(site.last.mirror).toBe(0);
    expect(site.sockets.at(-2)!.closed).toBe(true);
    await live(2001);
    expect(store.seq).toBe(2001);
    expect(told.at(-1)).toEqual(["live", 0]);
  });

  test("is not refused by another one that may not know of the run yet", async () => {
    await live(1000);
    site.last.onclose?.({ code: 1006 });
    site.pass(500);
    site.last.onclose?.({ code: 4404 });
    site.pass(500);
    expect(site.last.mirror).toBe(0);
    site.last.onclose?.({ code: 4404 });
    expect(told.at(-1)).toEqual(["refused", 0]);
  });
});
