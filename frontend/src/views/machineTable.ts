// The table of machines, one row each. The order of rows does not depend on values that change, so
// rows stay where they are. A machine's plan opens below its row.

import { describePause } from "./pauseTexts";
import {
  cloneTemplate,
  replaceRows,
  requireElement,
  setText,
  watchVisibility,
  whenIdle,
} from "../dom";
import { formatAge, formatCount, formatInteger } from "../format";
import type { Store } from "../store";
import type { Machine, PlanView } from "../types";
import { formatAgreement, formatPeers, formatUpload } from "./exchangeSummary";
import { compareStepTimes, PlanRow } from "./planRow";

/** What a row's values are compared with. */
interface RunContext {
  /** The mirror's clock, in seconds since 1970. */
  now: number;
  /** The tokens of the machine that has published most; at least 1. */
  mostTokens: number;
  /** Machines that report. */
  aliveMachines: number;
}

/** A machine's row of the table. */
interface Row {
  element: HTMLElement;
  cells: Map<string, HTMLElement>; // by data-cell
  planButton: HTMLButtonElement;
  planRow: PlanRow | null; // while the plan is open
  /** Whether its weights were those of the others when they could last be compared. */
  agrees: boolean | null;
  /** What its cells show; null until they were filled. */
  shown: { machine: Machine; plan: PlanView | undefined; aliveMachines: number } | null;
}

const UNKNOWN = "–";
const HIDDEN_MS = 60_000; // between two drawings of the same machines while nobody sees the table
const HIDDEN_CHANGE_MS = 5_000; // the same after machines have joined or gone
const IDLE_MS = 4_000; // for which work that nobody sees waits for an idle moment
const VISIBLE_IDLE_MS = 100; // for which rows that readers see wait for one

/** The text of each cell, by its data-cell. */
const CELL_TEXTS: Record<string, (machine: Machine, run: RunContext) => string> = {
  name: (machine) => machine.name,
  person: (machine) => machine.person,
  activity: formatActivity,
  tokens: (machine) => formatCount(machine.tokens),
  rate: (machine) => (machine.alive ? formatInteger(machine.rate) : UNKNOWN),
  peers: (machine, { aliveMachines }) => formatPeers(machine, aliveMachines),
  upload: (machine) => (machine.alive ? formatUpload(machine.exchange) : UNKNOWN),
  lag: ({ alive, exchange }) => (alive && exchange ? formatInteger(exchange.lag) : UNKNOWN),
};

/** Draws the machines and, where a reader opens it, their plans. */
export class MachineTable {
  private readonly body: HTMLElement;
  private readonly rowTemplate: HTMLTemplateElement;
  private readonly planTemplate: HTMLTemplateElement;
  private readonly emptyText: HTMLElement;
  private readonly hiddenCount: HTMLElement;
  private readonly rows = new Map<string, Row>(); // by the machine's id
  private store: Store | null = null;
  private isVisible = false;
  private drawnAt = -Infinity; // milliseconds since the page was opened
  private isScheduled = false;

  constructor(card: HTMLElement) {
    this.body = requireElement(card, "tbody");
    this.rowTemplate = requireElement(card, "template[data-template=machine]");
    this.planTemplate = requireElement(card, "template[data-template=plan]");
    this.emptyText = requireElement(card, "[data-empty]");
    this.hiddenCount = requireElement(card, "[data-hidden-count]");
    watchVisibility(card, (isVisible) => {
      this.isVisible = isVisible;
      if (isVisible && this.store) this.draw(this.store);
    });
  }

  draw(store: Store): void {
    this.store = store;
    const isComplete = [...store.workers.keys()].every((id) => this.rows.has(id));
    const isSame = isComplete && store.workers.size === this.rows.size;
    const wait = isSame ? HIDDEN_MS : HIDDEN_CHANGE_MS;
    if (this.isVisible && isComplete) this.drawRows(store);
    else if (this.isVisible) this.drawWhenIdle(VISIBLE_IDLE_MS);
    else if (performance.now() >= this.drawnAt + wait) this.drawWhenIdle(IDLE_MS);
  }

  /** Draw without delaying what the reader sees: a large run has hundreds of machines. */
  private drawWhenIdle(timeout: number): void {
    if (this.isScheduled) return;
    this.isScheduled = true;
    whenIdle((hasTime) => {
      this.isScheduled = false;
      if (this.store) this.createRows(this.store, hasTime);
    }, timeout);
  }

  /** Create the rows that are missing, and draw all; continue later if there is no time left. */
  private createRows(store: Store, hasTime: () => boolean): void {
    const context = createContext(store);
    for (const [id, machine] of store.workers) {
      if (this.rows.has(id)) continue;
      const row = this.createRow(id);
      fillRow(row, machine, store.plans.get(id), context);
      this.rows.set(id, row);
      if (hasTime()) continue;
      this.drawWhenIdle(this.isVisible ? VISIBLE_IDLE_MS : IDLE_MS);
      return;
    }
    this.drawRows(store);
  }

  private drawRows(store: Store): void {
    this.drawnAt = performance.now();
    for (const id of this.rows.keys()) if (!store.workers.has(id)) this.rows.delete(id);
    const machines = [...store.workers.values()].sort(compareByName);
    const context = createContext(store);
    const elements = machines.flatMap((machine) => {
      const row = this.rows.get(machine.id)!;
      fillRow(row, machine, store.plans.get(machine.id), context);
      return row.planRow ? [row.element, row.planRow.element] : [row.element];
    });
    replaceRows(this.body, elements);
    this.emptyText.hidden = machines.length > 0;
    this.showHiddenCount((store.run?.workers_known ?? 0) - machines.length);
  }

  private showHiddenCount(count: number): void {
    this.hiddenCount.hidden = count <= 0;
    this.hiddenCount.textContent = count > 0 ? `…and ${formatInteger(count)} more` : "";
  }

  private createRow(id: string): Row {
    const element = cloneTemplate(this.rowTemplate);
    const cells = [...element.querySelectorAll<HTMLElement>("[data-cell]")];
    const row: Row = {
      element,
      cells: new Map(cells.map((cell) => [cell.dataset.cell!, cell])),
      planButton: requireElement(element, "[data-plan-button]"),
      planRow: null,
      agrees: null,
      shown: null,
    };
    row.planButton.addEventListener("click", () => {
      row.planRow = row.planRow ? null : new PlanRow(this.planTemplate, `plan-${id}`);
      row.shown = null;
      if (this.store) this.drawRows(this.store);
    });
    return row;
  }
}

function createContext(store: Store): RunContext {
  let mostTokens = 1;
  for (const { tokens } of store.workers.values()) mostTokens = Math.max(mostTokens, tokens);
  return { now: store.now, mostTokens, aliveMachines: store.run?.workers_alive ?? 0 };
}

function fillRow(
  row: Row,
  machine: Machine,
  plan: PlanView | undefined,
  context: RunContext,
): void {
  const { element, cells } = row;
  const share = machine.tokens / context.mostTokens;
  cells.get("share")?.style.setProperty("--share", share.toFixed(4));
  setText(cells.get("last_seen"), formatAge(context.now - machine.last_seen));
  const { aliveMachines } = context;
  const { shown } = row;
  const isShown = shown?.machine === machine && shown.plan === plan;
  if (isShown && shown.aliveMachines === aliveMachines) return;
  row.shown = { machine, plan, aliveMachines };
  element.dataset.alive = String(machine.alive);
  element.dataset.activity = machine.activity;
  // While it cannot be compared, the last result stays, as in the page's head.
  row.agrees = machine.alive ? (machine.agrees ?? row.agrees) : null;
  element.dataset.agrees = String(row.agrees);
  setText(cells.get("agrees"), formatAgreement(row.agrees));
  for (const [name, formatCell] of Object.entries(CELL_TEXTS)) {
    setText(cells.get(name), formatCell(machine, context));
  }

  const step = compareStepTimes(plan, machine.step_seconds);
  setText(cells.get("step"), step.text);
  setText(cells.get("deviation"), step.deviation);
  cells.get("deviation")?.toggleAttribute("data-large", step.isLarge);

  if (plan) row.planRow?.fill(plan, machine);
  else row.planRow = null;
  updatePlanButton(row, machine.name, plan !== undefined);
}

function updatePlanButton(row: Row, machineName: string, hasPlan: boolean): void {
  const { element, planButton, planRow } = row;
  element.classList.toggle("is-open", planRow !== null);
  planButton.hidden = !hasPlan;
  planButton.setAttribute("aria-label", `How ${machineName} trains`);
  planButton.setAttribute("aria-expanded", String(planRow !== null));
  if (planRow) planButton.setAttribute("aria-controls", planRow.id);
  else planButton.removeAttribute("aria-controls");
}

/** Format what a machine does. One that stopped reporting without leaving is "gone". */
function formatActivity(machine: Machine): string {
  const hasEnded = machine.activity === "left" || machine.activity === "finished";
  if (!machine.alive && !hasEnded) return "gone";
  const isPaused = machine.pause && machine.activity === "paused";
  const activity = isPaused ? describePause(machine.pause!) : machine.activity;
  return machine.crew.length ? `${activity}, crew of ${machine.crew.length}` : activity;
}

function compareByName(a: Machine, b: Machine): number {
  return (
    a.person.localeCompare(b.person) || a.name.localeCompare(b.name) || a.id.localeCompare(b.id)
  );
}
