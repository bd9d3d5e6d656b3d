// The script of every page: theme switch, copy buttons, htmx, and the live parts of a run's page.

import "./css/main.css";
import { enableConfirmations } from "./confirmations";
import { enableCopyButtons } from "./copyButtons";
import { enableErrorClearing } from "./fieldErrors";
import { enableMenuClosing } from "./menus";
import { enablePresetHints } from "./presetHints";
import { enableRunSelection } from "./runSelection";
import { enableThemeSwitch } from "./theme";

enableThemeSwitch(document);
enableCopyButtons(document);
enablePresetHints(document);
enableConfirmations(document);
enableErrorClearing(document);
enableMenuClosing(document);
enableRunSelection(document);

// The charts are loaded only where there is a run to show.
const runElement = document.querySelector<HTMLElement>("[data-live-run]");
const compareElement = document.querySelector<HTMLElement>("[data-compare-runs]");
if (compareElement) {
  void import("./comparePage").then(({ startComparePage }) => startComparePage(compareElement));
}
const machineElement = document.querySelector<HTMLElement>("[data-machine-history]");
if (machineElement) {
  void import("./machinePage").then(({ startMachinePage }) => startMachinePage(machineElement));
}
const started = runElement
  ? import("./runPage").then(({ startRunPage }) => startRunPage(runElement))
  : Promise.resolve();
// What readers wait for on a run's page comes before the parts that htmx loads there.
void started.finally(() => import("htmx.org"));
