// The live parts of a run's page: the feed writes to the store, and the views draw what is in it.
// The server has rendered the page; snapshots and deltas change it afterwards.

import { findAxisSpeed } from "./chartAxes";
import { ChartGroup } from "./chartGroup";
import { parseView } from "./chartExport";
import { requireElement } from "./dom";
import { findPageInterval, FRAME_MS } from "./drawPace";
import { MirrorSelector, parseMirrors } from "./failover";
import { createBrowserEnvironment, LiveFeed } from "./liveFeed";
import { PreferenceControls } from "./preferences";
import { Store } from "./store";
import { Barn } from "./views/barn";
import { ChartToolbar } from "./views/chartToolbar";
import { CheckpointRefresh } from "./views/checkpointRefresh";
import { ConnectionStatusView } from "./views/connectionStatus";
import { EventList } from "./views/eventList";
import { LossChart } from "./views/lossChart";
import { MachineTable } from "./views/machineTable";
import { MetricChart } from "./views/metricChart";
import { RunFigures } from "./views/runFigures";
import { RunNotices } from "./views/runNotices";
import { startSwarm } from "./views/swarmGraph";
import { createBrowserCurveEnvironment, WorkerCurveLoader } from "./workerCurves";

const FIRST_DRAWINGS = 1; // take longer than later ones
const COST_SHARE = 0.3; // of the last drawing in the running mean

/** Something on the page that shows a part of the store. */
interface View {
  draw(store: Store): void;
}

/** Connect to the site and draw what it sends. `page` is the element with `data-live-run`. */
export function startRunPage(page: HTMLElement): void {
  const runId = page.dataset.liveRun!;
  const store = new Store();
  const linkedView = parseView(location.hash);
  const preferences = new PreferenceControls(page, linkedView.values);
  const charts = new ChartGroup();
  charts.zoom = linkedView.zoom;

  // Draw
  const notices = new RunNotices(page, Date.now() / 1000);
  const lossChart = requireElement(page, "[data-loss-chart]");
  const stepTokens = Number(lossChart.dataset.stepTokens);
  const drawCharts = ({ run }: Store) => {
    charts.speed = findAxisSpeed(preferences.value.xAxis, stepTokens, run!.rate);
    charts.draw();
  };
  const views: View[] = [
    notices,
    new RunFigures(page),
    new Barn(requireElement(page, "[data-barn]")),
    new LossChart(lossChart, preferences, charts),
    ...[...page.querySelectorAll<HTMLElement>("[data-metric-chart]")].map(
      (card) => new MetricChart(card, preferences, charts),
    ),
    { draw: drawCharts },
    new MachineTable(requireElement(page, "[data-machine-table]")),
    new EventList(requireElement(page, "[data-events]"), preferences),
    new CheckpointRefresh(page),
  ];
  new ChartToolbar(requireElement(page, "[data-chart-toolbar]"), preferences, charts);
  const scheduleDrawing = drawOnChange(store, views, (interval) => feed.followPace(interval));
  let xAxis = preferences.value.xAxis;
  preferences.onChange(() => {
    // A section of one axis is none of another.
    if (preferences.value.xAxis !== xAxis) charts.zoomTo(null);
    xAxis = preferences.value.xAxis;
    scheduleDrawing();
  });
  store.subscribe(() => {
    // That nothing arrives must show although nothing else changes.
    if (store.isSilent !== notices.isSilent) notices.draw(store);
  });

  // Receive snapshots and deltas. Other mirrors show public runs only.
  const mirrors = parseMirrors(page);
  const selector = new MirrorSelector(page.dataset.failover === "true" ? mirrors.length : 1);
  const connection = new ConnectionStatusView(page, mirrors);
  const feed = new LiveFeed(
    store,
    createBrowserEnvironment(runId, mirrors),
    (status, mirror) => connection.show(status, mirror),
    selector,
  );

  // Fetch the machines' own curves while they are shown
  const curveEnvironment = createBrowserCurveEnvironment(
    runId,
    () => mirrors[selector.current]!.base,
  );
  const curves = new WorkerCurveLoader(store, curveEnvironment);
  const loadCurvesIfShown = () => {
    const { machineCurves, machineRates } = preferences.value;
    curves.setEnabled(machineCurves || machineRates);
  };
  preferences.onChange(loadCurvesIfShown);
  loadCurvesIfShown();

  // Fetch the connections while they are visible
  const swarm = requireElement(page, "[data-swarm]");
  startSwarm(swarm, () => `${mirrors[selector.current]!.base}/live/${runId}/swarm/`);

  retryWhenUseful(feed);
  feed.start();
  feed.prefetch();
}

/**
 * Draw the views once for all changes between two animation frames.
 *
 * @param onPace - is called after each drawing but the first one, which loads fonts and compiles
 *   scripts, with the milliseconds until the next one
 * @returns a function that draws them with the next frame
 */
function drawOnChange(store: Store, views: View[], onPace: (interval: number) => void): () => void {
  let isScheduled = false;
  let drawnAt = -Infinity; // milliseconds since the page was opened
  let cost = 0; // milliseconds of one drawing, a running mean
  let drawings = 0;
  const finished = new MessageChannel();
  finished.port1.onmessage = () => {
    cost += COST_SHARE * (performance.now() - drawnAt - cost);
    drawings++;
    if (drawings > FIRST_DRAWINGS) onPace(findPageInterval(cost) + FRAME_MS);
  };
  const draw = () => {
    isScheduled = false;
    // The machines' curves may arrive before the first snapshot.
    if (!store.run) return;
    drawnAt = performance.now();
    for (const view of views) view.draw(store);
    // The browser lays the page out and paints it before the next task.
    finished.port2.postMessage(null);
  };
  const schedule = () => {
    if (isScheduled) return;
    isScheduled = true;
    requestAnimationFrame(draw);
  };
  store.subscribe(() => {
    const interval = findPageInterval(cost);
    if (performance.now() - drawnAt >= interval) schedule();
  });
  return schedule;
}

/** Retry when the network or the page comes back; stop while the page is in the browser's cache. */
function retryWhenUseful(feed: LiveFeed): void {
  addEventListener("online", () => feed.retryNow());
  document.addEventListener("visibilitychange", () => {
    if (!document.hidden) feed.retryNow();
  });
  addEventListener("pagehide", () => feed.stop());
  addEventListener("pageshow", (event) => {
    if (event.persisted) feed.start();
  });
}
