// The machines of a run as a graph with its table. They are fetched only while the graph is visible.

import { setText, requireElement } from "../dom";
import { formatByteRate } from "../format";
import { findPlace, findWidth, formatRoute, listRows, SIZE, summarizeSwarm } from "../swarmLayout";
import type { Swarm } from "../types";
import { formatAgreement } from "./exchangeSummary";

const SVG = "http://www.w3.org/2000/svg";
const FETCH_INTERVAL_MS = 10_000;
const MAX_LABELS = 16; // with more machines the names stand in the table only
const LABEL_DISTANCE = 16; // from a machine's mark, in units of the drawing
const RELAY_RADIUS = 5; // of the mark on a connection, in units of the drawing
const MAX_NAME = 11; // characters
const UNKNOWN = "–";

/** Show the connections in `card`, fetched from the address that `findAddress` returns. */
export function startSwarm(card: HTMLElement, findAddress: () => string): void {
  const view = new SwarmView(card);
  let isVisible = false;
  const load = async () => {
    if (!isVisible || document.hidden) return;
    try {
      const address = findAddress();
      const credentials = address.startsWith("/") ? "same-origin" : "omit";
      const response = await fetch(address, { headers: { Accept: "application/json" }, credentials });
      if (!response.ok) throw new Error(`the site answered ${response.status}`);
      view.show((await response.json()) as Swarm);
    } catch (error) {
      console.info("the connections could not be fetched:", error);
    }
  };
  new IntersectionObserver(([entry]) => {
    isVisible = entry?.isIntersecting ?? false;
    void load();
  }).observe(card);
  window.setInterval(() => void load(), FETCH_INTERVAL_MS);
}

/** Draws the graph and fills the table. */
class SwarmView {
  private readonly drawing: HTMLElement;
  private readonly summary: HTMLElement;
  private readonly rows: HTMLElement;
  private shown = "";
  // The place of each machine that was drawn, so that those that stay do not move.
  private readonly order: string[] = [];

  constructor(private readonly card: HTMLElement) {
    this.drawing = requireElement(card, "[data-swarm-drawing]");
    this.summary = requireElement(card, "[data-swarm-summary]");
    this.rows = requireElement(card, "[data-swarm-rows]");
  }

  show(swarm: Swarm): void {
    const text = JSON.stringify(swarm);
    if (text === this.shown) return;
    this.shown = text;
    this.card.dataset.hasNodes = String(swarm.nodes.length > 0);
    setText(this.summary, summarizeSwarm(swarm));
    this.drawing.replaceChildren(this.draw(swarm));
    this.rows.replaceChildren(...this.createRows(swarm));
  }

  private draw(swarm: Swarm): SVGElement {
    const drawing = createElement("svg", {
      viewBox: `0 0 ${SIZE} ${SIZE}`,
      role: "img",
      "aria-label": summarizeSwarm(swarm),
    });
    const places = this.assignPlaces(swarm.nodes.map(({ id }) => id));
    for (const link of swarm.links) {
      const [from, to] = [places.get(link.source)!, places.get(link.target)!];
      const line = createElement("line", {
        class: "swarm-link",
        "data-agrees": String(link.agrees),
        x1: from.x,
        y1: from.y,
        x2: to.x,
        y2: to.y,
        "stroke-width": findWidth(link).toFixed(1),
      });
      drawing.append(line);
      if (link.relayed) drawing.append(createRelayMark((from.x + to.x) / 2, (from.y + to.y) / 2));
    }
    for (const node of swarm.nodes) {
      const { x, y, angle } = places.get(node.id)!;
      const mark = createElement("circle", {
        class: "swarm-node",
        "data-agrees": String(node.agrees),
        cx: x,
        cy: y,
        r: swarm.nodes.length <= MAX_LABELS ? 8 : 4,
      });
      const title = createElement("title", {});
      title.textContent = `${node.name}, ${node.person}`;
      mark.append(title);
      drawing.append(mark);
      if (swarm.nodes.length <= MAX_LABELS) drawing.append(createLabel(node.name, x, y, angle));
    }
    return drawing;
  }

  /** Return each machine's place; one that is new gets the first free one. */
  private assignPlaces(ids: string[]): Map<string, ReturnType<typeof findPlace>> {
    const present = new Set(ids);
    this.order.forEach((id, i) => {
      if (!present.has(id)) this.order[i] = "";
    });
    for (const id of ids) {
      if (this.order.includes(id)) continue;
      const free = this.order.indexOf("");
      if (free >= 0) this.order[free] = id;
      else this.order.push(id);
    }
    return new Map(ids.map((id) => [id, findPlace(this.order.indexOf(id))]));
  }

  private createRows(swarm: Swarm): HTMLElement[] {
    return listRows(swarm).map(({ machine, peer, sent, received, agrees, relayed }) => {
      const row = document.createElement("tr");
      const head = document.createElement("th");
      head.scope = "row";
      head.append(createIsolated(machine.name));
      const cells = peer
        ? [
            peer.name,
            formatByteRate(sent),
            formatByteRate(received),
            formatRoute(relayed),
            formatAgreement(agrees),
          ]
        : ["none", UNKNOWN, UNKNOWN, UNKNOWN, UNKNOWN];
      row.append(head);
      cells.forEach((text, i) => {
        const cell = document.createElement("td");
        if (i === 1 || i === 2) cell.className = "is-number";
        cell.append(createIsolated(text));
        row.append(cell);
      });
      return row;
    });
  }
}

/** Create a text whose direction does not affect its surroundings. */
function createIsolated(text: string): HTMLElement {
  const element = document.createElement("bdi");
  element.textContent = text;
  return element;
}

/** Mark a connection that a relay server is part of. */
function createRelayMark(x: number, y: number): SVGElement {
  return createElement("circle", { class: "swarm-relay", cx: x, cy: y, r: RELAY_RADIUS });
}

/** Create a machine's name outside of the circle. */
function createLabel(name: string, x: number, y: number, angle: number): SVGElement {
  const radians = 2 * Math.PI * angle;
  const [across, down] = [Math.sin(radians), -Math.cos(radians)];
  const label = createElement("text", {
    class: "swarm-label",
    x: x + LABEL_DISTANCE * across,
    y: y + LABEL_DISTANCE * down,
    "text-anchor": Math.abs(across) < 0.2 ? "middle" : across > 0 ? "start" : "end",
    "dominant-baseline": Math.abs(down) < 0.8 ? "middle" : down > 0 ? "hanging" : "auto",
  });
  const characters = [...name];
  label.textContent =
    characters.length > MAX_NAME ? `${characters.slice(0, MAX_NAME - 1).join("")}…` : name;
  return label;
}

function createElement(tag: string, attributes: Record<string, string | number>): SVGElement {
  const element = document.createElementNS(SVG, tag) as SVGElement;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, String(value));
  return element;
}
