// The values of the run as a whole: each `data-figure` element shows one of them.

import { requireElement, setText } from "../dom";
import {
  formatCount,
  formatDuration,
  formatInteger,
  formatLoss,
  formatPercent,
} from "../format";
import type { Store } from "../store";
import type { Card, Run, RunStatus, HeadTile } from "../types";
import { formatAgreement } from "./exchangeSummary";

export const STATUS_LABELS: Record<RunStatus, string> = {
  draft: "Draft",
  recruiting: "Recruiting",
  training: "Training",
  paused: "Paused",
  finished: "Finished",
  cancelled: "Cancelled",
};

/** In which status the owner can use a control; the server checks it again. */
const CONTROL_STATUSES: Record<string, readonly RunStatus[]> = {
  launch: ["draft"],
  edit: ["draft"],
  pause: ["training"],
  resume: ["paused"],
  finish: ["training", "paused"],
  cancel: ["draft", "recruiting", "training", "paused"],
  verdicts: ["recruiting", "training", "paused"],
  archive: ["finished", "cancelled"],
};
const BEFORE_LAUNCH = ["launch", "edit"]; // controls that are hidden once a launch is requested
const UNKNOWN = "–";

/** Shows the run's values, status and controls. */
export class RunFigures {
  private readonly elements = new Map<string, HTMLElement[]>(); // by data-figure
  private readonly statusChip: HTMLElement;
  private readonly tiles: HTMLElement;
  private agree: boolean | null = null;
  private drawnStatus: RunStatus | null = null;

  constructor(private readonly page: HTMLElement) {
    this.statusChip = requireElement(page, "[data-status-chip]");
    this.tiles = requireElement(page, "[data-tiles]");
    for (const element of page.querySelectorAll<HTMLElement>("[data-figure]")) {
      const name = element.dataset.figure!;
      this.elements.set(name, [...(this.elements.get(name) ?? []), element]);
    }
  }

  draw(store: Store): void {
    const run = store.run;
    if (!run) return;
    // While no two machines can be compared, the last result stays.
    this.agree = run.agree ?? this.agree;
    const figures = {
      status: formatStatus(run.status, "launching" in this.statusChip.dataset),
      validation: formatLoss(run.validation_loss),
      train: formatLoss(run.training_loss),
      score: run.score === null ? UNKNOWN : formatPercent(run.score),
      final: formatLoss(run.validation_loss ?? run.training_loss),
      contributors: formatInteger(run.workers_known),
      people_known: formatPeople(run.people_known),
      confirmed: formatPeople(run.confirmed_by),
      rate: formatCount(run.rate),
      workers_alive: formatInteger(run.workers_alive),
      workers_known: formatInteger(run.workers_known),
      updates: formatInteger(run.updates),
      people: formatPeople(run.people),
      tokens: formatCount(run.tokens),
      budget: formatCount(run.budget),
      progress: formatPercent(run.tokens / run.budget),
      time_left: formatTimeLeft(run),
      agree: formatAgreement(this.agree),
      elapsed: formatElapsed(run, store.now),
    };
    for (const [name, text] of Object.entries(figures)) {
      for (const element of this.elements.get(name) ?? []) setText(element, text);
    }
    this.showTiles(run.tiles);
    this.showCards(run.cards);
    if (this.page.dataset.status !== run.status) this.hideOldNotices();
    this.page.dataset.status = run.status;
    this.page.dataset.live = String(run.is_live);
    this.page.dataset.agree = String(this.agree);
    this.statusChip.dataset.status = run.status;
    if (run.status !== this.drawnStatus) this.updateControls(run.status);
    this.drawnStatus = run.status;
    const title = [...summarizeInTitle(run, figures), run.name, "Barnraise"].join(" · ");
    if (title !== document.title) document.title = title;
  }

  /** Show the tiles of the run's state in their order, the others after them, hidden. */
  private showTiles(tiles: HeadTile[]): void {
    const names = tiles.join(" ");
    if (this.tiles.dataset.shown === names) return;
    this.tiles.dataset.shown = names;
    this.tiles.hidden = tiles.length === 0;
    const all = [...this.tiles.querySelectorAll<HTMLElement>("[data-tile]")];
    const place = (tile: HTMLElement) => tiles.indexOf(tile.dataset.tile as HeadTile);
    for (const tile of all) {
      tile.hidden = place(tile) < 0;
      tile.classList.toggle("is-main", place(tile) === 0);
    }
    const shown = all.filter((tile) => !tile.hidden).sort((a, b) => place(a) - place(b));
    this.tiles.append(...shown, ...all.filter((tile) => tile.hidden));
  }

  /** Show cards that the run's state has now; none disappears under the reader. */
  private showCards(cards: Card[]): void {
    for (const card of this.page.querySelectorAll<HTMLElement>("[data-card][hidden]")) {
      card.hidden = !cards.includes(card.dataset.card as Card);
    }
  }

  /** Mute what the server wrote above the page ("Resumed."): it was done, and may not last. */
  private hideOldNotices(): void {
    const notices = this.page.parentElement?.querySelectorAll(":scope > .notice[role=status]") ?? [];
    for (const notice of notices) {
      notice.classList.add("is-outdated");
      notice.textContent = notice.textContent!.split(/(?<=\.)\s/)[0]!;
    }
  }

  private updateControls(status: RunStatus): void {
    for (const control of this.page.querySelectorAll<HTMLElement>("[data-control]")) {
      const name = control.dataset.control!;
      const isAllowed = CONTROL_STATUSES[name]?.includes(status) ?? false;
      const isLaunching = control.dataset.launchRequested === "true";
      control.hidden = !isAllowed || (isLaunching && BEFORE_LAUNCH.includes(name));
    }
  }
}

/** The status in words. A draft whose launch its owner has requested is launching. */
export function formatStatus(status: RunStatus, isLaunchRequested: boolean): string {
  return status === "draft" && isLaunchRequested ? "Launching" : STATUS_LABELS[status];
}

/** Return what the title of the window says before the run's name: "62 %", "2.66". */
function summarizeInTitle(run: Run, figures: Record<string, string>): string[] {
  if (run.status !== "training") return [STATUS_LABELS[run.status]];
  const loss = figures.validation === UNKNOWN ? figures.train! : figures.validation!;
  return [figures.progress!, loss].filter((text) => text !== UNKNOWN);
}

/** The time from the run's start to its end, or until now. */
export function formatElapsed(run: Run, now: number): string {
  if (run.started === null) return UNKNOWN;
  return formatDuration(Math.max(0, (run.ended ?? now) - run.started));
}

function formatPeople(people: number): string {
  return people === 1 ? "1 person" : `${formatInteger(people)} people`;
}

function formatTimeLeft(run: Run): string {
  const isTraining = run.status === "training" && run.tokens < run.budget && run.rate > 0;
  return isTraining ? formatDuration((run.budget - run.tokens) / run.rate) : UNKNOWN;
}
