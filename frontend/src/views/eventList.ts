// What happened in the run, the newest first. What others wrote is text and nothing else.

import type { PreferenceControls } from "../preferences";
import { moment } from "../format";
import type { Store } from "../store";
import type { RunEvent } from "../types";

export class EventList {
  private readonly list: HTMLElement;
  private readonly pattern: HTMLTemplateElement;
  private readonly empty: HTMLElement;
  private readonly rows = new Map<string, HTMLElement>();

  constructor(private readonly place: HTMLElement, private readonly chosen: PreferenceControls) {
    this.list = place.querySelector("ol")!;
    this.pattern = place.querySelector("template")!;
    this.empty = place.querySelector("[data-empty]")!;
    this.list.replaceChildren();
    chosen.onChange(() => this.filter());
    this.filter();
  }

  draw(store: Store): void {
    const rows = store.events.map((event) => this.row(event, store.now));
    const kept = new Set<Element>(rows);
    for (const row of [...this.list.children]) if (!kept.has(row)) row.remove();
    rows.forEach((row, i) => {
      if (this.list.children[i] !== row) this.list.insertBefore(row, this.list.children[i] ?? null);
    });
    for (const id of [...this.rows.keys()]) if (!kept.has(this.rows.get(id)!)) this.rows.delete(id);
    this.empty.hidden = rows.length > 0;
  }

  private row(event: RunEvent, now: number): HTMLElement {
    const row = this.rows.get(event.id) ?? this.make(event);
    const time = row.querySelector("time")!;
    const text = moment(event.at, now);
    if (time.textContent !== text) time.textContent = text;
    return row;
  }

  private make(event: RunEvent): HTMLElement {
    const row = (this.pattern.content.cloneNode(true) as DocumentFragment).firstElementChild as HTMLElement;
    row.dataset.kind = event.kind;
    row.querySelector("time")!.dateTime = new Date(event.at * 1000).toISOString();
    row.querySelector("[data-who]")!.textContent = event.who;
    row.querySelector("[data-what]")!.textContent = event.what;
    this.rows.set(event.id, row);
    return row;
  }

  private filter(): void {
    this.place.dataset.comings = String(this.chosen.value.comings);
  }
}
