// A run's page without a browser, for the chaos test: the page's own feed and store on Node's
// sockets. Prints one line of JSON five times a second: what a reader would see.
//
// Usage: node pageClient.mjs SITE RUN

import { LiveFeed, RefusedError, type Environment } from "../src/liveFeed";
import type { Socket } from "../src/liveSocket";
import { Store } from "../src/store";
import type { Snapshot } from "../src/types";
import { findDelay } from "../src/views/runNotices";

declare const process: { argv: string[]; stdout: { write(text: string): void } };

const PRINT_MS = 200;
const SNAPSHOT_TIMEOUT_MS = 15_000; // as in the browser

const [site, run] = process.argv.slice(2) as [string, string];
const loadedAt = Date.now() / 1000;
const store = new Store();

const environment: Environment = {
  openSocket() {
    const address = `${site.replace("http", "ws")}/ws/runs/${run}/`;
    // Only Node's sockets accept headers; a browser sends the origin by itself.
    const options = { headers: { origin: site } } as unknown as string[];
    return new WebSocket(address, options) as unknown as Socket;
  },
  async fetchSnapshot() {
    const signal = AbortSignal.timeout(SNAPSHOT_TIMEOUT_MS);
    const response = await fetch(`${site}/live/${run}/`, { signal });
    if ([403, 404].includes(response.status)) throw new RefusedError(response.statusText);
    if (!response.ok) throw new Error(`the site answered ${response.status}`);
    return (await response.json()) as Snapshot;
  },
  setTimer: (milliseconds, callback) => setTimeout(callback, milliseconds) as unknown as number,
  clearTimer: (timer) => clearTimeout(timer),
  random: Math.random,
};

const feed = new LiveFeed(store, environment);
feed.start();
setInterval(() => {
  const machines = [...store.workers.values()].map((row) => [row.id, row.tokens]);
  const line = {
    at: Date.now() / 1000,
    connection: feed.status,
    seq: store.seq,
    status: store.run?.status ?? null,
    delayed_since: findDelay(store, loadedAt),
    machines: Object.fromEntries(machines),
  };
  process.stdout.write(`${JSON.stringify(line)}\n`);
}, PRINT_MS);
