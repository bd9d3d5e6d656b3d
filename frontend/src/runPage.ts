// The run page: socket → store → views. The server has rendered the page; snapshots and deltas change it afterwards.

import { PreferenceControls } from "./preferences";
import { browserCurveEnvironment, WorkerCurveLoader } from "./workerCurves";
import { MirrorSelector, parseMirrors } from "./failover";
import { browserEnvironment, LiveFeed, type ConnectionStatus } from "./socket";
import { Store } from "./store";
import { LossChart } from "./views/lossChart";
import { EventList } from "./views/eventList";
import { RunFigures } from "./views/runFigures";
import { Barn } from "./views/barn";
import { ConnectionStatusView } from "./views/connectionStatus";
import { ThroughputChart } from "./views/throughputChart";
import { MachineTable } from "./views/machineTable";

export function runPage(page: HTMLElement): void {
  const store = new Store();
  const run = page.dataset.liveRun!;
  const preferences = new PreferenceControls(page);
  const views = [
    new RunFigures(page),
    new Barn(page.querySelector("[data-frame]")!),
    new LossChart(page.querySelector("[data-loss-chart]")!, preferences),
    new ThroughputChart(page.querySelector("[data-pace-chart]")!),
    new MachineTable(page.querySelector("[data-workers]")!),
    new EventList(page.querySelector("[data-events]")!, preferences),
  ];
  const mirrors = parseMirrors(page);
  const selector = new MirrorSelector(page.dataset.follows === "true" ? mirrors.length : 1); // other mirrors show public runs only
  const connection = new ConnectionStatusView(page, mirrors);
  const showStatus = (status: ConnectionStatus, mirror: number) => connection.show(status, mirror);
  const feed = new LiveFeed(store, browserEnvironment(run, mirrors), showStatus, selector);
  const curves = new WorkerCurveLoader(store, browserCurveEnvironment(run, () => mirrors[selector.current]!.base));
  preferences.onChange(() => curves.setEnabled(preferences.value.machines));
  curves.setEnabled(preferences.value.machines);

  let isScheduled = false;
  store.subscribe(() => {
    if (isScheduled) return;
    isScheduled = true; // draw once for all deltas between two animation frames
    requestAnimationFrame(() => {
      isScheduled = false;
      if (store.run) for (const view of views) view.draw(store); // the machines' curves may arrive before the first snapshot
    });
  });
  addEventListener("online", () => feed.retryNow());
  document.addEventListener("visibilitychange", () => document.hidden || feed.retryNow());
  addEventListener("pagehide", () => feed.stop());
  addEventListener("pageshow", (event) => event.persisted && feed.start());
  feed.start();
}
