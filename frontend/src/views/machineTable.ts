// The workers, one row each, in an order that does not depend on their numbers: rows stay where they are. Below a row
// its plan opens.

import { ago, count, whole } from "../format";
import type { Store } from "../store";
import type { PlanView, Machine } from "../types";
import { PlanRow, predictedAndMeasured } from "./planRow";
import { line, reach, weights } from "./exchangeSummary";


const COLUMNS: readonly [name: string, text: (worker: Machine, now: number, alive: number) => string][] = [
  ["name", (w) => w.name],
  ["person", (w) => w.person],
  ["activity", (w) => (w.alive || w.activity === "left" || w.activity === "finished" ? w.activity : "gone")],
  ["seen", (w, now) => ago(now - w.last_seen)],
  ["tokens", (w) => count(w.tokens)],
  ["rate", (w) => (w.alive ? whole(w.rate) : "–")],
  ["reach", (w, _now, alive) => reach(w, alive)],
  ["line", (w) => (w.alive ? line(w.exchange) : "–")],
  ["lag", (w) => (w.alive && w.exchange ? whole(w.exchange.lag) : "–")],
  ["weights", weights],
];

/** What a row is seen against: the site's clock, the most tokens of one machine, the machines that are there. */
interface Around {
  now: number;
  most: number;
  alive: number;
}

interface Row {
  element: HTMLElement;
  cells: Map<string, HTMLElement>;
  opener: HTMLButtonElement;
  plan: PlanRow | null; // while it is open
}

export class MachineTable {
  private readonly body: HTMLElement;
  private readonly patterns: Record<"worker" | "plan", HTMLTemplateElement>;
  private readonly empty: HTMLElement;
  private readonly more: HTMLElement;
  private readonly rows = new Map<string, Row>();
  private store: Store | null = null;

  constructor(place: HTMLElement) {
    this.body = place.querySelector("tbody")!;
    this.patterns = {
      worker: place.querySelector("template[data-pattern=worker]")!,
      plan: place.querySelector("template[data-pattern=plan]")!,
    };
    this.empty = place.querySelector("[data-empty]")!;
    this.more = place.querySelector("[data-more]")!;
    this.body.replaceChildren();
  }

  draw(store: Store): void {
    this.store = store;
    const shown = [...store.workers.values()].sort(byName);
    const more = (store.run?.workers_known ?? 0) - shown.length;
    const most = Math.max(1, ...shown.map((w) => w.tokens));
    const alive = store.run?.workers_alive ?? 0;
    const wanted = shown.flatMap((worker) => {
      const row = this.rows.get(worker.id) ?? this.make(worker.id);
      this.fill(row, worker, store.plans.get(worker.id), { now: store.now, most, alive });
      return row.plan ? [row.element, row.plan.element] : [row.element];
    });
    this.place(wanted);
    this.empty.hidden = shown.length > 0;
    this.more.hidden = more <= 0;
    this.more.textContent = more > 0 ? `…and ${whole(more)} more` : "";
  }

  /** Moves no row that is in its place already: moving one would take the keyboard's focus from it. */
  private place(wanted: HTMLElement[]): void {
    const kept = new Set<Element>(wanted);
    for (const row of [...this.body.children]) if (!kept.has(row)) row.remove();
    wanted.forEach((row, i) => {
      const there = this.body.children[i];
      if (row !== there) this.body.insertBefore(row, there ?? null);
    });
  }

  private make(id: string): Row {
    const element = (this.patterns.worker.content.cloneNode(true) as DocumentFragment).firstElementChild as HTMLElement;
    const cells = new Map<string, HTMLElement>();
    for (const cell of element.querySelectorAll<HTMLElement>("[data-cell]")) cells.set(cell.dataset.cell!, cell);
    const row: Row = { element, cells, opener: element.querySelector("[data-open]")!, plan: null };
    row.opener.addEventListener("click", () => {
      row.plan = row.plan ? null : new PlanRow(this.patterns.plan, `plan-${id}`);
      if (this.store) this.draw(this.store);
    });
    this.rows.set(id, row);
    return row;
  }

  private fill(row: Row, worker: Machine, plan: PlanView | undefined, { now, most, alive }: Around): void {
    const { element, cells } = row;
    element.dataset.alive = String(worker.alive);
    element.dataset.activity = worker.activity;
    element.dataset.agrees = String(worker.agrees);
    for (const [name, text] of COLUMNS) put(cells.get(name), text(worker, now, alive));
    cells.get("share")?.style.setProperty("--share", (worker.tokens / most).toFixed(4));
    const [step, off, far] = predictedAndMeasured(plan, worker.step_seconds);
    put(cells.get("step"), step);
    put(cells.get("deviation"), off);
    cells.get("deviation")?.toggleAttribute("data-far", far);
    if (plan) row.plan?.fill(plan, worker);
    else row.plan = null;
    open(row, worker.name, plan !== undefined);
  }
}

function open({ element, opener, plan }: Row, name: string, possible: boolean): void {
  element.classList.toggle("is-open", plan !== null);
  opener.hidden = !possible;
  opener.setAttribute("aria-label", `How ${name} trains`);
  opener.setAttribute("aria-expanded", String(plan !== null));
  if (plan) opener.setAttribute("aria-controls", plan.id);
  else opener.removeAttribute("aria-controls");
}

function put(cell: HTMLElement | undefined, text: string): void {
  if (cell && cell.textContent !== text) cell.textContent = text;
}

function byName(a: Machine, b: Machine): number {
  return a.person.localeCompare(b.person) || a.name.localeCompare(b.name) || a.id.localeCompare(b.id);
}
