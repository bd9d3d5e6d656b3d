// The list of what happened in the run, the newest first. Names and sentences that others wrote are
// inserted as text, never as markup.

import { cloneTemplate, replaceRows, requireElement, setText } from "../dom";
import { formatDay, formatInteger, formatMoment } from "../format";
import type { PreferenceControls } from "../preferences";
import type { Store } from "../store";
import type { RunEvent } from "../types";

/** Draws the events, a row each. */
export class EventList {
  private readonly list: HTMLElement;
  private readonly template: HTMLTemplateElement;
  private readonly emptyText: HTMLElement;
  private rows = new Map<string, HTMLElement>(); // by the event's id
  private drawnEvents: RunEvent[] | null = null;
  private drawnDay = "";
  private readonly older: HTMLElement;
  private readonly olderCount: HTMLElement;

  constructor(
    private readonly card: HTMLElement,
    private readonly preferences: PreferenceControls,
  ) {
    this.list = requireElement(card, "ol");
    this.template = requireElement(card, "template");
    this.emptyText = requireElement(card, "[data-empty]");
    this.older = requireElement(card, "[data-older]");
    this.olderCount = requireElement(card, "[data-older-count]");
    preferences.onChange(() => this.applyFilter());
    this.applyFilter();
  }

  draw(store: Store): void {
    const older = (store.run?.event_count ?? 0) - store.events.length;
    this.older.hidden = older <= 0;
    setText(this.olderCount, formatInteger(Math.max(0, older)));
    // A time shows its date from the next day on.
    const day = formatDay(store.now);
    if (store.events === this.drawnEvents && day === this.drawnDay) return;
    this.drawnEvents = store.events;
    this.drawnDay = day;
    const rows = new Map<string, HTMLElement>();
    for (const event of store.events) {
      const row = this.rows.get(event.id) ?? this.createRow(event);
      setText(requireElement(row, "time"), formatMoment(event.at, store.now));
      rows.set(event.id, row);
    }
    this.rows = rows;
    replaceRows(this.list, [...rows.values()]);
    this.emptyText.hidden = rows.size > 0;
  }

  private createRow(event: RunEvent): HTMLElement {
    const row = cloneTemplate(this.template);
    row.dataset.kind = event.kind;
    const time = requireElement<HTMLTimeElement>(row, "time");
    time.dateTime = new Date(event.at * 1000).toISOString();
    time.title = new Date(event.at * 1000).toLocaleString();
    requireElement(row, "[data-who]").textContent = event.who;
    requireElement(row, "[data-what]").textContent = event.what;
    return row;
  }

  /** Show or hide kinds of events; the style sheet does so by the attributes. */
  private applyFilter(): void {
    const { machineEvents, checkpointEvents } = this.preferences.value;
    this.card.dataset.machineEvents = String(machineEvents);
    this.card.dataset.checkpointEvents = String(checkpointEvents);
  }
}
