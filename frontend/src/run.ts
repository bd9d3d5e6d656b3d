// The run page: socket → store → views. The server has drawn all of it once; from here on only frames move it.

import { Chosen } from "./choices";
import { browserLines, LineFeed } from "./lines";
import { Choice, mirrorsOf } from "./mirrors";
import { browser, Feed, type Link } from "./socket";
import { Store } from "./store";
import { LossChart } from "./views/chart";
import { Events } from "./views/events";
import { Figures } from "./views/figures";
import { Frame } from "./views/frame";
import { LinkSign } from "./views/link";
import { Pace } from "./views/pace";
import { Table } from "./views/table";

export function runPage(page: HTMLElement): void {
  const store = new Store();
  const run = page.dataset.liveRun!;
  const chosen = new Chosen(page);
  const views = [
    new Figures(page),
    new Frame(page.querySelector("[data-frame]")!),
    new LossChart(page.querySelector("[data-loss-chart]")!, chosen),
    new Pace(page.querySelector("[data-pace-chart]")!),
    new Table(page.querySelector("[data-workers]")!),
    new Events(page.querySelector("[data-events]")!, chosen),
  ];
  const mirrors = mirrorsOf(page);
  const choice = new Choice(page.dataset.follows === "true" ? mirrors.length : 1); // else it takes a session
  const sign = new LinkSign(page, mirrors);
  const feed = new Feed(store, browser(run, mirrors), (link: Link, at: number) => sign.show(link, at), choice);
  const lines = new LineFeed(store, browserLines(run, () => mirrors[choice.at]!.base));
  chosen.onChange(() => lines.want(chosen.value.machines));
  lines.want(chosen.value.machines);

  let asked = false;
  store.subscribe(() => {
    if (asked) return;
    asked = true; // several frames at once are drawn once
    requestAnimationFrame(() => {
      asked = false;
      if (store.run) for (const view of views) view.draw(store); // the machines' lines may come before the first frame
    });
  });
  addEventListener("online", () => feed.nudge());
  document.addEventListener("visibilitychange", () => document.hidden || feed.nudge());
  addEventListener("pagehide", () => feed.stop());
  addEventListener("pageshow", (event) => event.persisted && feed.start());
  feed.start();
}
