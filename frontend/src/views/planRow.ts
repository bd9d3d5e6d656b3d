// How one machine trains: the step that its plan predicts next to the measured one, and the row that
// shows the whole plan.

import { cloneTemplate, requireElement, setText } from "../dom";
import { formatBytes, formatInteger, formatPercent, formatStepTime } from "../format";
import type { CrewSeat, Machine, PlanView } from "../types";
import { describeExchange } from "./exchangeSummary";

export const SMALL_DEVIATION = 0.15; // as a share of the predicted step
const LARGE_RATIO = 1.5; // of the measured step to the predicted one

type Tier = "device" | "host" | "disk";

const CLIPPING_LABELS: Record<PlanView["clipping"], string> = {
  none: "None",
  exact: "Exact, over all layers",
  layer: "Layer by layer",
};
const BINDING_LABELS: Record<string, string> = {
  compute: "Computing",
  disk: "The disk",
  link: "The link to the GPU",
  optimizer: "The optimizer",
};
const CRASH_LOSS_LABELS: Record<PlanView["crash_safety"], string> = {
  exact: "Its unfinished step",
  round: "Its round's steps",
  restart: "Its round's steps and moments",
};
const UNKNOWN = "–";

/** A machine's predicted and measured step. */
export interface StepComparison {
  /** Both times: "5.4 s / 5.1 s". */
  text: string;
  /** How the measured step compares with the predicted one: "as planned"; "" if unknown. */
  deviation: string;
  /** Whether the measured step is more than LARGE_RATIO times as long. */
  isLarge: boolean;
}

/** Compare the step that a plan predicts with the measured one, in seconds. */
export function compareStepTimes(
  plan: PlanView | undefined,
  measured: number | null,
): StepComparison {
  if (!plan) return { text: UNKNOWN, deviation: "", isLarge: false };
  const predicted = plan.predicted_seconds;
  const text = `${formatStepTime(predicted)} / ${formatMeasured(measured)}`;
  if (measured === null || predicted <= 0) return { text, deviation: "", isLarge: false };
  const ratio = measured / predicted;
  return { text, deviation: describeRatio(ratio), isLarge: ratio > LARGE_RATIO };
}

/** Describe how many times as long as planned a step takes. */
export function describeRatio(ratio: number): string {
  if (Math.abs(ratio - 1) <= SMALL_DEVIATION) return "as planned";
  if (ratio < 1) return `${Math.round((1 - ratio) * 100)} % shorter`;
  if (ratio < LARGE_RATIO) return `${Math.round((ratio - 1) * 100)} % longer`;
  return ratio < 99.5 ? `${ratio.toFixed(ratio < 9.95 ? 1 : 0)} times as long` : "far longer";
}

/** Explain what a deviation means, and what to do about it. */
export function explainDeviation(plan: PlanView, measured: number | null): string {
  if (measured === null || plan.predicted_seconds <= 0) return "Not measured yet";
  const ratio = measured / plan.predicted_seconds;
  if (Math.abs(ratio - 1) <= SMALL_DEVIATION) return "As planned";
  if (ratio < 1) return "Faster than planned: the machine is faster than when it was measured";
  return "Slower than planned: most often other programs use the machine, or it is hot. Its owner sees its load on its page";
}

function formatMeasured(seconds: number | null): string {
  return seconds === null ? UNKNOWN : formatStepTime(seconds);
}

/** Describe a plan in words, by the names of the `data-fact` elements. */
export function describePlan(plan: PlanView, measured: number | null): Record<string, string> {
  const written = plan.disk_written_per_day;
  const microBatches = formatInteger(plan.micro_batches);
  const microTokens = formatInteger(plan.micro_tokens);
  return {
    sentence: plan.sentence,
    device: plan.device === "cpu" ? "CPU" : plan.device || UNKNOWN,
    device_bytes: formatBytes(plan.device_bytes),
    host_bytes: formatBytes(plan.host_bytes),
    disk_bytes: formatBytes(plan.disk_bytes),
    predicted_seconds: formatStepTime(plan.predicted_seconds),
    step_seconds: formatMeasured(measured),
    deviation: explainDeviation(plan, measured),
    binding: BINDING_LABELS[plan.binding] ?? (plan.binding || UNKNOWN),
    micro_batches: `${microBatches} × ${microTokens} tokens`,
    groups: formatInteger(plan.groups),
    resident: `${formatInteger(plan.resident)} of ${formatInteger(plan.layers)}`,
    clipping: CLIPPING_LABELS[plan.clipping],
    disk_written_per_day: written ? formatBytes(written) : "Nothing",
    crash_safety: CRASH_LOSS_LABELS[plan.crash_safety],
  };
}

/** Describe a machine's part of its crew: "Blocks 3 to 5, 38 % of the work". */
export function describeSeat(seat: CrewSeat): string {
  const last = seat.first_block + seat.blocks - 1;
  const first = formatInteger(seat.first_block);
  const blocks = seat.blocks === 1 ? `Block ${first}` : `Blocks ${first} to ${formatInteger(last)}`;
  const state = seat.connected ? "" : ", not connected";
  return `${blocks}, ${formatPercent(seat.share)} of the work${state}`;
}

function createSeatElement(): HTMLElement {
  const element = document.createElement("div");
  element.append(document.createElement("dt"), document.createElement("dd"));
  return element;
}

/** Compute each tier's share of all bytes that a plan takes. */
export function computeTierShares(plan: PlanView): Record<Tier, number> {
  const total = Math.max(1, plan.device_bytes + plan.host_bytes + plan.disk_bytes);
  return {
    device: plan.device_bytes / total,
    host: plan.host_bytes / total,
    disk: plan.disk_bytes / total,
  };
}

/** The row below a machine's own row that shows its plan. */
export class PlanRow {
  readonly element: HTMLElement;
  private readonly facts: HTMLElement[];
  private readonly tiers: HTMLElement[];
  private readonly crew: HTMLElement;

  constructor(
    template: HTMLTemplateElement,
    readonly id: string,
  ) {
    this.element = cloneTemplate(template);
    this.element.id = id;
    this.facts = [...this.element.querySelectorAll<HTMLElement>("[data-fact]")];
    this.tiers = [...this.element.querySelectorAll<HTMLElement>("[data-tier]")];
    this.crew = requireElement(this.element, "[data-crew]");
  }

  /** Show a machine's plan and exchange, and the crew that it leads. */
  fill(plan: PlanView, machine: Machine): void {
    const region = requireElement(this.element, "[role=region]");
    region.setAttribute("aria-label", `How ${machine.name} trains`);
    const texts = { ...describePlan(plan, machine.step_seconds), ...describeExchange(machine) };
    for (const fact of this.facts) setText(fact, texts[fact.dataset.fact!] ?? "");
    const shares = computeTierShares(plan);
    for (const tier of this.tiers) {
      const share = shares[tier.dataset.tier as Tier];
      tier.hidden = share === 0;
      tier.style.setProperty("--share", share.toFixed(4));
    }
    this.showCrew(machine.crew);
  }

  private showCrew(crew: CrewSeat[]): void {
    this.crew.hidden = crew.length === 0;
    const list = requireElement(this.crew, "dl");
    while (list.children.length > crew.length) list.lastElementChild!.remove();
    crew.forEach((seat, index) => {
      const element = list.children[index] ?? list.appendChild(createSeatElement());
      setText(requireElement(element, "dt"), seat.name);
      setText(requireElement(element, "dd"), describeSeat(seat));
    });
  }
}
