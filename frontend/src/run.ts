// The run page: socket → store → views. The server has drawn all of it once; from here on only frames move it.

import { browser, Feed, type Link } from "./socket";
import { Store } from "./store";
import { LossChart } from "./views/chart";
import { Figures } from "./views/figures";
import { Frame } from "./views/frame";
import { LinkSign } from "./views/link";
import { Pace } from "./views/pace";
import { Table } from "./views/table";

export function runPage(page: HTMLElement): void {
  const store = new Store();
  const views = [
    new Figures(page),
    new Frame(page.querySelector("[data-frame]")!),
    new LossChart(page.querySelector("[data-loss-chart]")!),
    new Pace(page.querySelector("[data-pace-chart]")!),
    new Table(page.querySelector("[data-workers]")!),
  ];
  const sign = new LinkSign(page);
  const feed = new Feed(store, browser(page.dataset.liveRun!), (link: Link) => sign.show(link));

  let asked = false;
  store.subscribe(() => {
    if (asked) return;
    asked = true; // several frames at once are drawn once
    requestAnimationFrame(() => {
      asked = false;
      for (const view of views) view.draw(store);
    });
  });
  addEventListener("online", () => feed.nudge());
  document.addEventListener("visibilitychange", () => document.hidden || feed.nudge());
  addEventListener("pagehide", () => feed.stop());
  addEventListener("pageshow", (event) => event.persisted && feed.start());
  feed.start();
}
