// The numbers of the run: each `data-figure` element shows one, in a width reserved for it.

import { count, duration, loss, percent, whole } from "../format";
import type { Store } from "../store";
import type { Run, RunStatus } from "../types";

export const STATUS_WORDS: Record<RunStatus, string> = {
  draft: "Draft",
  recruiting: "Recruiting",
  training: "Training",
  paused: "Paused",
  finished: "Finished",
  cancelled: "Cancelled",
};

/** Which of the owner's controls make sense in which status; the server decides again when one is used. */
const CONTROLS: Record<string, readonly RunStatus[]> = {
  launch: ["draft"],
  edit: ["draft"],
  pause: ["training"],
  resume: ["paused"],
  cancel: ["draft", "recruiting", "training", "paused"],
};

export class RunFigures {
  private readonly places = new Map<string, HTMLElement[]>();
  private readonly chip: HTMLElement;
  private agree: boolean | null = null;

  constructor(private readonly page: HTMLElement) {
    this.chip = page.querySelector("[data-status-chip]")!;
    for (const element of page.querySelectorAll<HTMLElement>("[data-figure]")) {
      const name = element.dataset.figure!;
      this.places.set(name, [...(this.places.get(name) ?? []), element]);
    }
  }

  draw(store: Store): void {
    const run = store.run;
    if (!run) return;
    this.put("status", STATUS_WORDS[run.status]);
    this.put("validation", loss(store.series.validation.at(-1)?.[1]));
    this.put("train", loss(recent(store.series.train)));
    this.put("rate", count(run.rate));
    this.put("alive", whole(run.workers_alive));
    this.put("known", whole(run.workers_known));
    this.put("updates", whole(run.updates));
    this.put("tokens", count(run.tokens));
    this.put("budget", count(run.budget));
    this.put("share", percent(run.tokens / run.budget));
    this.put("left", left(run));
    this.agree = run.agree ?? this.agree; // while nobody can be compared, the last verdict stands
    this.put("agree", this.agree === null ? "–" : this.agree ? "Identical" : "Differ");
    this.put("elapsed", run.started ? duration(Math.max(0, store.now - run.started)) : "–");
    this.put("waiting", run.waiting ?? "");
    const waiting = this.page.querySelector<HTMLElement>("[data-waiting]");
    if (waiting) waiting.hidden = !run.waiting;
    if (this.page.dataset.status !== run.status) {
      // what the page said when it loaded ("Training goes on.") is no longer so
      for (const told of this.page.parentElement?.querySelectorAll(":scope > .note") ?? []) told.remove();
    }
    this.page.dataset.status = run.status;
    this.page.dataset.agree = String(this.agree);
    this.chip.dataset.status = run.status;
    for (const control of this.page.querySelectorAll<HTMLElement>("[data-control]")) {
      const requested = control.dataset.requested === "true";
      const allowed = CONTROLS[control.dataset.control!]?.includes(run.status) ?? false;
      control.hidden = !allowed || (requested && ["launch", "edit"].includes(control.dataset.control!));
    }
  }

  private put(name: string, text: string): void {
    for (const element of this.places.get(name) ?? []) if (element.textContent !== text) element.textContent = text;
  }
}

/** The mean of the newest few points: one noisy step is not the loss. */
function recent(points: [number, number][]): number | undefined {
  const newest = points.slice(-8);
  return newest.length ? newest.reduce((sum, point) => sum + point[1], 0) / newest.length : undefined;
}

function left(run: Run): string {
  if (run.status !== "training" || run.tokens >= run.budget) return "–";
  return run.rate > 0 ? duration((run.budget - run.tokens) / run.rate) : "–";
}
