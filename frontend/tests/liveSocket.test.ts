import { beforeEach, describe, expect, test } from "vitest";
import { BATCH_MS, LiveSocket, SILENCE_MS } from "../src/liveSocket";
import { CONNECTION_LOST, FakeSite, FORBIDDEN, NOT_FOUND } from "./fakeSite";

let site: FakeSite;
let socket: LiveSocket;
let received: string[][];
let calls: string[];

function openSocket(mirror = 0): void {
  socket = new LiveSocket(site, mirror, {
    onOpen: () => calls.push("open"),
    onMessages: (texts) => received.push(texts),
    onLost: () => calls.push("lost"),
    onRefused: () => calls.push("refused"),
  });
}

function sendText(text: string): void {
  site.sockets[0]!.onmessage?.({ data: text });
}

beforeEach(() => {
  site = new FakeSite();
  received = [];
  calls = [];
  openSocket();
});

describe("LiveSocket", () => {
  test("delivers each message alone", () => {
    site.acceptConnection();
    sendText("1");
    sendText("2");
    expect(received).toEqual([["1"], ["2"]]);
    expect([calls, socket.interval]).toEqual([["open"], 0]);
  });

  test.each([
    [CONNECTION_LOST, "lost"],
    [FORBIDDEN, "refused"],
    [NOT_FOUND, "refused"],
  ])("reports once how it was closed (%d)", (code, outcome) => {
    site.closeConnection(code);
    site.closeConnection(code);
    site.advanceTime(SILENCE_MS);
    expect(calls).toEqual([outcome]);
  });

  test("counts as lost when nothing arrives for a while", () => {
    site.advanceTime(SILENCE_MS - 1);
    sendText("1");
    site.advanceTime(SILENCE_MS - 1);
    expect(calls).toEqual([]);
    site.advanceTime(1);
    expect([calls, site.lastSocket.closed]).toEqual([["lost"], true]);
  });

  test("calls nothing after it has been closed", () => {
    socket.close();
    site.acceptConnection();
    sendText("1");
    site.closeConnection();
    site.advanceTime(SILENCE_MS);
    expect([calls, received, site.lastSocket.closed]).toEqual([[], [], true]);
  });
});

describe("LiveSocket of a slow device", () => {
  test("is replaced by batches when these have delivered", () => {
    socket.followPace(BATCH_MS, true);
    sendText("1");
    expect([site.lastSocket.closed, socket.interval]).toEqual([false, 0]);
    site.batches[0]!.onbatch!(["1", "2"]);
    expect([site.lastSocket.closed, socket.interval]).toEqual([true, BATCH_MS]);
    sendText("3");
    expect(received).toEqual([["1"], ["1", "2"]]);
  });

  test("receives each message alone while the page draws often or is not live", () => {
    socket.followPace(BATCH_MS - 1, true);
    socket.followPace(BATCH_MS, false);
    expect(site.batches).toHaveLength(0);
  });

  test("receives each message alone from another mirror", () => {
    openSocket(1);
    socket.followPace(BATCH_MS, true);
    expect(site.batches).toHaveLength(0);
  });

  test("follows the pace of the drawings", () => {
    socket.followPace(BATCH_MS, true);
    socket.followPace(5_000, true);
    site.batches[0]!.onbatch!(["1"]);
    socket.followPace(1_000, false);
    expect([site.batches.length, site.batches[0]!.interval]).toEqual([1, 1_000]);
  });

  test("stays as it is if the worker fails", () => {
    socket.followPace(BATCH_MS, true);
    site.batches[0]!.onclose!();
    sendText("1");
    site.batches[0]!.onbatch?.(["2"]);
    socket.followPace(BATCH_MS, true);
    expect([site.batches[0]!.closed, site.batches.length]).toEqual([true, 1]);
    expect([received, calls]).toEqual([[["1"]], []]);
  });

  test("is lost with the connection of its batches", () => {
    socket.followPace(BATCH_MS, true);
    site.batches[0]!.onbatch!(["1"]);
    site.batches[0]!.onclose!();
    expect([calls, site.batches[0]!.closed]).toEqual([["lost"], true]);
  });

  test("closes both connections at the end", () => {
    socket.followPace(BATCH_MS, true);
    socket.close();
    expect([site.sockets[0]!.closed, site.batches[0]!.closed]).toEqual([true, true]);
  });
});
