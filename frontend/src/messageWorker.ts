// A web worker that receives a run's messages over a websocket and hands them to the page together:
// the main thread of a slow device then has one task every few seconds instead of a dozen for each
// message. messageBatches.ts talks to it.

import type { WorkerAnswer, WorkerOrder } from "./messageBatches";

let texts: string[] = [];
let interval = 0; // milliseconds between two batches
let timer: number | null = null; // until the next batch may be sent

const answer = (message: WorkerAnswer) => self.postMessage(message);

/** Send what has arrived; what arrives next waits for `interval`. */
function sendBatch(): void {
  timer = null;
  if (!texts.length) return;
  answer({ texts });
  texts = [];
  timer = self.setTimeout(sendBatch, interval);
}

self.onmessage = ({ data }: MessageEvent<WorkerOrder>) => {
  interval = data.interval;
  if (!data.address) return;
  const socket = new WebSocket(data.address);
  socket.onmessage = ({ data: text }: MessageEvent<string>) => {
    texts.push(text);
    if (timer === null) sendBatch();
  };
  socket.onclose = () => answer({ closed: true });
};
