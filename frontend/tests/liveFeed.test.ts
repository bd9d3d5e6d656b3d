import { beforeEach, describe, expect, test } from "vitest";
import { FIRST_HOME_CHECK_MS, MirrorSelector } from "../src/failover";
import {
  GAP_WAIT_MS,
  LATE_MS,
  LiveFeed,
  RefusedError,
  type ConnectionStatus,
} from "../src/liveFeed";
import { BATCH_MS, SILENCE_MS } from "../src/liveSocket";
import { Store } from "../src/store";
import { CONNECTION_LOST, FakeSite, FORBIDDEN, NOT_FOUND, waitForCallbacks } from "./fakeSite";
import { createDelta, createSnapshot } from "./messages";

let site: FakeSite;
let store: Store;
let feed: LiveFeed;

async function connect(seq = 10): Promise<void> {
  site.acceptConnection();
  await site.answerSnapshot(createSnapshot(seq));
}

beforeEach(() => {
  site = new FakeSite();
  store = new Store();
});

describe("LiveFeed with one mirror", () => {
  let statuses: ConnectionStatus[];

  beforeEach(() => {
    statuses = [];
    feed = new LiveFeed(store, site, (status) => statuses.push(status));
    feed.start();
  });

  test("fetches the snapshot once the socket is open, so that no delta is lost", async () => {
    expect(site.requests).toHaveLength(0);
    site.acceptConnection();
    site.sendDelta(createDelta(11, { run: { tokens: 11 } }));
    site.sendDelta(createDelta(12, { run: { tokens: 12 } }));
    await site.answerSnapshot(createSnapshot(11));
    expect(store.seq).toBe(12);
    expect(store.run?.tokens).toBe(12);
    expect(statuses).toEqual(["live"]);
  });

  test("shows a snapshot that was requested early, and requests no other one", async () => {
    feed.prefetch();
    await site.answerSnapshot(createSnapshot(10));
    expect(store.seq).toBe(10);
    expect(statuses).toEqual([]);
    site.acceptConnection();
    await waitForCallbacks();
    expect(site.requests).toHaveLength(1);
    expect(statuses).toEqual(["live"]);
    // A delta that was sent before the socket was open is missing.
    site.sendDelta(createDelta(12, { run: { tokens: 12 } }));
    site.advanceTime(GAP_WAIT_MS);
    await site.answerSnapshot(createSnapshot(12));
    expect([store.seq, site.requests.length]).toEqual([12, 2]);
  });

  test("retries when the snapshot that was requested early fails", async () => {
    feed.prefetch();
    await site.failSnapshot(new Error("503"));
    site.acceptConnection();
    await waitForCallbacks();
    expect(statuses).toEqual(["reconnecting"]);
  });

  test("closes a gap with a new snapshot", async () => {
    await connect();
    site.sendDelta(createDelta(12));
    expect(site.requests).toHaveLength(1);
    site.advanceTime(GAP_WAIT_MS);
    expect(site.requests).toHaveLength(2);
    await site.answerSnapshot(createSnapshot(12));
    site.sendDelta(createDelta(13, { run: { tokens: 13 } }));
    expect(store.run?.tokens).toBe(13);
    expect(statuses).toEqual(["live"]);
  });

  test("requests no snapshot when the missing delta arrives late", async () => {
    await connect();
    site.sendDelta(createDelta(12));
    site.sendDelta(createDelta(11));
    site.advanceTime(GAP_WAIT_MS * 2);
    expect(store.seq).toBe(12);
    expect(site.requests).toHaveLength(1);
  });

  test("requests another snapshot when one ends before the waiting deltas", async () => {
    await connect();
    site.sendDelta(createDelta(20));
    site.advanceTime(GAP_WAIT_MS);
    await site.answerSnapshot(createSnapshot(15));
    site.advanceTime(GAP_WAIT_MS);
    expect(site.requests).toHaveLength(3);
    await site.answerSnapshot(createSnapshot(20));
    expect(store.hasGap).toBe(false);
  });

  test("reconnects after a lost connection and starts from a snapshot", async () => {
    await connect();
    site.closeConnection();
    expect(statuses).toEqual(["live", "reconnecting"]);
    site.advanceTime(500);
    expect(site.sockets).toHaveLength(2);
    await connect(40);
    expect(statuses).toEqual(["live", "reconnecting", "live"]);
    expect(store.seq).toBe(40);
  });

  test("waits longer after every failure up to a limit", () => {
    const waits: number[] = [];
    for (let i = 0; i < 9; i++) {
      site.closeConnection();
      const sockets = site.sockets.length;
      let wait = 0;
      while (site.sockets.length === sockets) {
        site.advanceTime(100);
        wait += 100;
      }
      waits.push(wait);
    }
    expect(waits.slice(0, 4)).toEqual([500, 1000, 2000, 4000]);
    expect(Math.max(...waits)).toBe(15_000);
  });

  test("reconnects after a failed snapshot", async () => {
    site.acceptConnection();
    await site.failSnapshot(new Error("503"));
    expect(statuses).toEqual(["reconnecting"]);
    expect(site.lastSocket.closed).toBe(true);
    site.advanceTime(500);
    expect(site.sockets).toHaveLength(2);
  });

  test("reconnects when nothing arrives for a while", async () => {
    await connect();
    site.advanceTime(SILENCE_MS - 1);
    site.sendDelta(createDelta(11));
    site.advanceTime(SILENCE_MS - 1);
    expect(feed.status).toBe("silent");
    site.advanceTime(1);
    expect(feed.status).toBe("reconnecting");
  });

  test("says so when nothing has arrived for five seconds, until a delta arrives", async () => {
    await connect();
    site.advanceTime(LATE_MS - 1);
    expect([feed.status, store.isSilent]).toEqual(["live", false]);
    site.advanceTime(1);
    expect([feed.status, store.isSilent]).toEqual(["silent", true]);
    site.sendDelta(createDelta(11));
    expect([feed.status, store.isSilent]).toEqual(["live", false]);
    expect(statuses).toEqual(["live", "silent", "live"]);
  });

  test("says so while it connects for the first time, and through reconnections", async () => {
    site.closeConnection();
    site.advanceTime(LATE_MS);
    expect([feed.status, store.isSilent]).toEqual(["reconnecting", true]);
    await connect();
    expect([feed.status, store.isSilent]).toEqual(["live", false]);
    site.closeConnection();
    expect(store.isSilent).toBe(false);
    site.advanceTime(LATE_MS);
    expect([feed.status, store.isSilent]).toEqual(["reconnecting", true]);
  });

  test("says so while deltas are missing, although others arrive", async () => {
    await connect();
    for (let number = 12; number <= 16; number++) {
      site.advanceTime(1_000);
      site.sendDelta(createDelta(number));
    }
    expect(store.isSilent).toBe(true);
  });

  test("ignores the snapshot of a connection that was lost in the meantime", async () => {
    site.acceptConnection();
    const oldRequest = site.lastRequest;
    site.closeConnection();
    site.advanceTime(500);
    oldRequest.resolve(createSnapshot(3));
    await waitForCallbacks();
    expect(store.run).toBeNull();
    expect(feed.status).toBe("reconnecting");
  });

  test("ignores messages of an old socket", async () => {
    await connect();
    const oldSocket = site.lastSocket;
    oldSocket.onclose?.({ code: CONNECTION_LOST });
    site.advanceTime(500);
    await connect(20);
    oldSocket.onmessage?.({ data: JSON.stringify(createDelta(21, { run: { tokens: 666 } })) });
    expect(store.run?.tokens).toBe(1000);
  });

  test("stops after a refused connection", async () => {
    site.closeConnection(FORBIDDEN);
    site.advanceTime(60_000);
    expect(statuses).toEqual(["refused"]);
    expect(site.sockets).toHaveLength(1);
  });

  test("stops after a refused snapshot", async () => {
    site.acceptConnection();
    await site.failSnapshot(new RefusedError("not found"));
    site.advanceTime(60_000);
    expect(statuses).toEqual(["refused"]);
    expect(site.sockets).toHaveLength(1);
  });

  test("retryNow ends a wait, and does nothing while connected", async () => {
    await connect();
    feed.retryNow();
    expect(site.sockets).toHaveLength(1);
    site.closeConnection();
    feed.retryNow();
    expect(site.sockets).toHaveLength(2);
  });

  test("stop closes the socket and ends all retries", async () => {
    await connect();
    feed.stop();
    site.advanceTime(60_000);
    expect(site.sockets).toHaveLength(1);
    expect(site.lastSocket.closed).toBe(true);
  });
});

describe("LiveFeed with two mirrors", () => {
  let statuses: [ConnectionStatus, number][];

  beforeEach(() => {
    statuses = [];
    const selector = new MirrorSelector(2, () => 0.5);
    feed = new LiveFeed(store, site, (...status) => statuses.push(status), selector);
    feed.start();
  });

  test("continues at the other mirror with its snapshot and its numbers", async () => {
    await connect(1000);
    site.closeConnection();
    site.advanceTime(500);
    expect(site.lastSocket.mirror).toBe(1);
    site.acceptConnection();
    site.sendDelta(createDelta(8, { run: { tokens: 2222 }, train: [[300, 3]] }));
    expect(site.lastRequest.mirror).toBe(1);
    expect(store.run?.tokens).toBe(1000); // the old state stays until the snapshot arrives
    await site.answerSnapshot(createSnapshot(7, { now: 1, train: [[100, 5], [200, 4]] }));
    expect(store.seq).toBe(8);
    expect(store.run?.tokens).toBe(2222);
    expect(store.curves.train).toEqual([[100, 5], [200, 4], [300, 3]]);
    expect(statuses).toEqual([["live", 0], ["reconnecting", 0], ["live", 1]]);
  });

  test("tries the mirrors in turn and waits longer each round", () => {
    const mirrors: number[] = [];
    for (let i = 0; i < 5; i++) {
      mirrors.push(site.lastSocket.mirror);
      site.closeConnection();
      site.advanceTime(500 * 2 ** Math.floor(i / 2));
    }
    expect(mirrors).toEqual([0, 1, 0, 1, 0]);
  });

  test("returns to its own mirror once that answers, and stays live until then", async () => {
    await connect(1000);
    site.closeConnection();
    site.advanceTime(500);
    await connect(7);
    let seq = 7;
    const receiveFor = (milliseconds: number) => {
      for (let i = 0; i < milliseconds; i += 10_000) {
        site.advanceTime(10_000);
        site.sendDelta(createDelta(++seq));
      }
    };

    receiveFor(FIRST_HOME_CHECK_MS);
    expect(site.lastRequest.mirror).toBe(0);
    await site.failSnapshot(new Error("still unavailable"));
    expect(site.lastSocket.mirror).toBe(1);

    receiveFor(FIRST_HOME_CHECK_MS);
    expect(statuses.at(-1)).toEqual(["live", 1]);
    await site.answerSnapshot(createSnapshot(2000));
    expect(site.lastSocket.mirror).toBe(0);
    expect(site.sockets.at(-2)!.closed).toBe(true);

    await connect(2001);
    expect(store.seq).toBe(2001);
    expect(statuses.at(-1)).toEqual(["live", 0]);
  });

  test("stops only after its own mirror's refusal, as others may not have the run yet", async () => {
    await connect(1000);
    site.closeConnection();
    site.advanceTime(500);
    site.closeConnection(NOT_FOUND);
    site.advanceTime(500);
    expect(site.lastSocket.mirror).toBe(0);
    site.closeConnection(NOT_FOUND);
    expect(statuses.at(-1)).toEqual(["refused", 0]);
  });
});

describe("LiveFeed of a slow device", () => {
  const delta = (seq: number) => JSON.stringify(createDelta(seq, { run: { tokens: seq } }));
  let statuses: ConnectionStatus[];

  beforeEach(async () => {
    statuses = [];
    feed = new LiveFeed(store, site, (status) => statuses.push(status), new MirrorSelector(2));
    feed.start();
    await connect(10);
  });

  test("replaces its socket by batches when these have delivered, without a snapshot", () => {
    let changes = 0;
    store.subscribe(() => changes++);
    feed.followPace(BATCH_MS);
    site.sendDelta(createDelta(11));
    expect(site.sockets[0]!.closed).toBe(false);
    site.batches[0]!.onbatch!([delta(11), delta(12), delta(13)]);
    expect(site.sockets[0]!.closed).toBe(true);
    expect([store.seq, store.run?.tokens, changes]).toEqual([13, 13, 2]);
    expect([site.requests.length, statuses]).toEqual([1, ["live"]]);
    site.sendDelta(createDelta(14)); // of the socket that was closed
    expect(store.seq).toBe(13);
  });

  test("connects again by a socket when the batches' connection is lost", async () => {
    feed.followPace(BATCH_MS);
    site.batches[0]!.onbatch!([delta(11)]);
    site.batches[0]!.onclose!();
    expect([statuses.at(-1), site.batches[0]!.closed]).toEqual(["reconnecting", true]);
    site.advanceTime(60_000);
    expect(site.sockets).toHaveLength(2);
  });

  test("waits for the next batch before it says that figures are delayed", () => {
    feed.followPace(5_000);
    site.batches[0]!.onbatch!([delta(11)]);
    site.advanceTime(LATE_MS + 4_999);
    expect(store.isSilent).toBe(false);
    site.advanceTime(1);
    expect([store.isSilent, statuses.at(-1)]).toEqual([true, "silent"]);
  });

  test("fetches a snapshot for a gap between batches", async () => {
    feed.followPace(BATCH_MS);
    site.batches[0]!.onbatch!([delta(11), delta(13)]);
    site.advanceTime(GAP_WAIT_MS);
    await site.answerSnapshot(createSnapshot(13));
    expect([store.seq, site.requests.length]).toEqual([13, 2]);
  });
});
