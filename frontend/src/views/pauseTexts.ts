// What the table of machines says of a machine that takes no steps.

import { formatMoment } from "../format";
import type { PauseReason, PauseView } from "../types";

/** As `PAUSE_TEXTS` of the site's fleet, which a test compares with these. */
export const PAUSE_TEXTS: Record<PauseReason, string> = {
  here: "paused on the machine itself",
  site: "paused on the site by its owner",
  run: "paused with its run",
  recruiting: "waits for more machines",
  hours: "paused by its hours",
  in_use: "paused: somebody uses it",
  battery: "paused: on battery",
  busy: "paused: other programs use its CPU",
  program: "paused: a program runs that goes first",
  hot: "paused: too hot",
  traffic: "paused: this month's upload is used up",
  disk_writes: "paused: today's disk writes are used up",
  rules: "paused: its limits cannot be read",
  owner: "waits for the run's owner",
};

/** Describe why a machine pauses and, where that is known, until when by the reader's clock. */
export function describePause(pause: PauseView): string {
  const text = PAUSE_TEXTS[pause.reason] ?? "paused";
  return pause.until ? `${text}, until ${formatMoment(pause.until, Date.now() / 1000)}` : text;
}
