// The table of machines, one row each. The order of rows does not depend on values that change, so
// rows stay where they are. A machine's plan opens below its row.

import { cloneTemplate, replaceRows, requireElement, setText } from "../dom";
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
}

const UNKNOWN = "–";

/** The text of each cell, by its data-cell. */
const CELL_TEXTS: Record<string, (machine: Machine, run: RunContext) => string> = {
  name: (machine) => machine.name,
  person: (machine) => machine.person,
  activity: formatActivity,
  last_seen: (machine, { now }) => formatAge(now - machine.last_seen),
  tokens: (machine) => formatCount(machine.tokens),
  rate: (machine) => (machine.alive ? formatInteger(machine.rate) : UNKNOWN),
  peers: (machine, { aliveMachines }) => formatPeers(machine, aliveMachines),
  upload: (machine) => (machine.alive ? formatUpload(machine.exchange) : UNKNOWN),
  lag: ({ alive, exchange }) => (alive && exchange ? formatInteger(exchange.lag) : UNKNOWN),
  agrees: (machine) => formatAgreement(machine.agrees),
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

  constructor(card: HTMLElement) {
    this.body = requireElement(card, "tbody");
    this.rowTemplate = requireElement(card, "template[data-template=machine]");
    this.planTemplate = requireElement(card, "template[data-template=plan]");
    this.emptyText = requireElement(card, "[data-empty]");
    this.hiddenCount = requireElement(card, "[data-hidden-count]");
    this.body.replaceChildren();
  }

  draw(store: Store): void {
    this.store = store;
    const machines = [...store.workers.values()].sort(compareByName);
    const context: RunContext = {
      now: store.now,
      mostTokens: Math.max(1, ...machines.map((machine) => machine.tokens)),
      aliveMachines: store.run?.workers_alive ?? 0,
    };
    const elements = machines.flatMap((machine) => {
      const row = this.rows.get(machine.id) ?? this.createRow(machine.id);
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
    };
    row.planButton.addEventListener("click", () => {
      row.planRow = row.planRow ? null : new PlanRow(this.planTemplate, `plan-${id}`);
      if (this.store) this.draw(this.store);
    });
    this.rows.set(id, row);
    return row;
  }
}

function fillRow(
  row: Row,
  machine: Machine,
  plan: PlanView | undefined,
  context: RunContext,
): void {
  const { element, cells } = row;
  element.dataset.alive = String(machine.alive);
  element.dataset.activity = machine.activity;
  element.dataset.agrees = String(machine.agrees);
  for (const [name, formatCell] of Object.entries(CELL_TEXTS)) {
    setText(cells.get(name), formatCell(machine, context));
  }
  const share = machine.tokens / context.mostTokens;
  cells.get("share")?.style.setProperty("--share", share.toFixed(4));

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
  return machine.alive || hasEnded ? machine.activity : "gone";
}

function compareByName(a: Machine, b: Machine): number {
  return (
    a.person.localeCompare(b.person) || a.name.localeCompare(b.name) || a.id.localeCompare(b.id)
  );
}
