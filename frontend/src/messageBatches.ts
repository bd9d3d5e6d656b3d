// A run's messages from a web worker, many at a time (messageWorker.ts).

/** What the page tells the worker: which socket to open, and how long to collect messages. */
export interface WorkerOrder {
  /** Of the socket; absent if only the interval changes. */
  address?: string;
  /** Milliseconds between two batches. */
  interval: number;
}

/** What the worker tells the page. */
export interface WorkerAnswer {
  texts?: string[];
  /** The socket has closed, or was never open. */
  closed?: true;
}

/** A connection whose messages arrive together. */
export interface MessageBatches {
  onbatch: ((texts: string[]) => void) | null;
  onclose: (() => void) | null;
  /** Change the milliseconds between two batches. */
  setInterval(milliseconds: number): void;
  close(): void;
}

/** Open a websocket in a web worker. */
export function openMessageBatches(address: URL, interval: number): MessageBatches {
  const worker = new Worker(new URL("./messageWorker.ts", import.meta.url), { type: "module" });
  const order = (message: WorkerOrder) => worker.postMessage(message);
  const batches: MessageBatches = {
    onbatch: null,
    onclose: null,
    setInterval: (milliseconds) => order({ interval: milliseconds }),
    close: () => worker.terminate(),
  };
  worker.onmessage = ({ data }: MessageEvent<WorkerAnswer>) => {
    if (data.texts) batches.onbatch?.(data.texts);
    if (data.closed) batches.onclose?.();
  };
  worker.onerror = () => batches.onclose?.(); // it could not be loaded
  order({ address: address.href, interval });
  return batches;
}
