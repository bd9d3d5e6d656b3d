// The workers, one row each, in an order that does not depend on their numbers: rows stay where they are.

import { ago, count, whole } from "../format";
import type { Store } from "../store";
import type { Worker } from "../types";

const ROWS = 200; // at most; the rest is said in a sentence

const COLUMNS: readonly [name: string, text: (worker: Worker, now: number) => string][] = [
  ["name", (w) => w.name],
  ["person", (w) => w.person],
  ["activity", (w) => (w.alive || w.activity === "left" || w.activity === "finished" ? w.activity : "gone")],
  ["seen", (w, now) => ago(now - w.last_seen)],
  ["tokens", (w) => count(w.tokens)],
  ["rate", (w) => (w.alive ? whole(w.rate) : "–")],
  ["sent", (w) => whole(w.updates_sent)],
  ["received", (w) => whole(w.updates_received)],
  ["peers", (w) => (w.alive ? whole(w.peers) : "–")],
  ["version", (w) => w.version || "–"],
];

interface Row {
  element: HTMLElement;
  cells: Map<string, HTMLElement>;
}

export class Table {
  private readonly body: HTMLElement;
  private readonly pattern: HTMLTemplateElement;
  private readonly empty: HTMLElement;
  private readonly more: HTMLElement;
  private readonly rows = new Map<string, Row>();

  constructor(place: HTMLElement) {
    this.body = place.querySelector("tbody")!;
    this.pattern = place.querySelector("template")!;
    this.empty = place.querySelector("[data-empty]")!;
    this.more = place.querySelector("[data-more]")!;
    this.body.replaceChildren();
  }

  draw(store: Store): void {
    const all = [...store.workers.values()].sort(byName);
    const shown = all.length > ROWS ? all.filter((w) => w.alive).concat(all.filter((w) => !w.alive)).slice(0, ROWS) : all;
    const most = Math.max(1, ...shown.map((w) => w.tokens));
    const wanted = shown.map((worker) => {
      const row = this.rows.get(worker.id) ?? this.make(worker.id);
      this.fill(row, worker, store.now, most);
      return row.element;
    });
    const inPlace = wanted.length === this.body.children.length && wanted.every((e, i) => e === this.body.children[i]);
    if (!inPlace) this.body.replaceChildren(...wanted);
    this.empty.hidden = all.length > 0;
    this.more.hidden = all.length <= ROWS;
    this.more.textContent = all.length > ROWS ? `…and ${whole(all.length - ROWS)} more` : "";
  }

  private make(id: string): Row {
    const element = (this.pattern.content.cloneNode(true) as DocumentFragment).firstElementChild as HTMLElement;
    const cells = new Map<string, HTMLElement>();
    for (const cell of element.querySelectorAll<HTMLElement>("[data-cell]")) cells.set(cell.dataset.cell!, cell);
    const row = { element, cells };
    this.rows.set(id, row);
    return row;
  }

  private fill({ element, cells }: Row, worker: Worker, now: number, most: number): void {
    element.dataset.alive = String(worker.alive);
    element.dataset.activity = worker.activity;
    for (const [name, text] of COLUMNS) {
      const cell = cells.get(name);
      const value = text(worker, now);
      if (cell && cell.textContent !== value) cell.textContent = value;
    }
    cells.get("share")?.style.setProperty("--share", (worker.tokens / most).toFixed(4));
  }
}

function byName(a: Worker, b: Worker): number {
  return a.person.localeCompare(b.person) || a.name.localeCompare(b.name) || a.id.localeCompare(b.id);
}
