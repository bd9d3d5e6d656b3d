// How one machine trains: what its plan predicts beside what is measured, and the whole plan in a row that opens.

import { bytes, deviation, seconds, whole } from "../format";
import type { PlanView, Machine } from "../types";
import { exchangeFacts } from "./exchangeSummary";

export const NEAR = 0.15; // of the prediction: a step measured within it goes as planned

const TIERS = ["device", "host", "disk"] as const;
type Tier = (typeof TIERS)[number];

const CLIPPING: Record<PlanView["clipping"], string> = {
  none: "None",
  exact: "Exact, over all layers",
  layer: "Layer by layer",
};
const LIMITS: Record<string, string> = {
  compute: "Computing",
  disk: "The disk",
  link: "The link to the GPU",
  optimizer: "The optimizer",
};
const A_CRASH_LOSES: Record<PlanView["crash_safety"], string> = {
  exact: "Its unfinished step",
  round: "Its round's steps",
  restart: "Its round's steps and moments",
};

/** "5.4 s / 5.1 s", how far the second is off the first, and whether that is far. */
export function predictedAndMeasured(plan: PlanView | undefined, measured: number | null): [string, string, boolean] {
  if (!plan) return ["–", "", false];
  const text = `${seconds(plan.predicted_seconds)} / ${measured === null ? "–" : seconds(measured)}`;
  if (measured === null || plan.predicted_seconds <= 0) return [text, "", false];
  const off = measured / plan.predicted_seconds - 1;
  return [text, deviation(off), Math.abs(off) > NEAR];
}

/** The plan in words, by the name of the place that shows each. */
export function facts(plan: PlanView, measured: number | null): Record<string, string> {
  return {
    sentence: plan.sentence,
    device_bytes: bytes(plan.device_bytes),
    host_bytes: bytes(plan.host_bytes),
    disk_bytes: bytes(plan.disk_bytes),
    predicted: seconds(plan.predicted_seconds),
    measured: measured === null ? "–" : seconds(measured),
    binding: LIMITS[plan.binding] ?? (plan.binding || "–"),
    device: plan.device === "cpu" ? "CPU" : plan.device || "–",
    micro_batches: `${whole(plan.micro_batches)} × ${whole(plan.micro_tokens)} tokens`,
    groups: whole(plan.groups),
    resident: `${whole(plan.resident)} of ${whole(plan.layers)}`,
    clipping: CLIPPING[plan.clipping],
    written: plan.disk_written_per_day ? bytes(plan.disk_written_per_day) : "Nothing",
    crash_safety: A_CRASH_LOSES[plan.crash_safety],
  };
}

/** Each tier's part of all the bytes the plan needs. */
export function shares(plan: PlanView): Record<Tier, number> {
  const all = Math.max(1, plan.device_bytes + plan.host_bytes + plan.disk_bytes);
  return { device: plan.device_bytes / all, host: plan.host_bytes / all, disk: plan.disk_bytes / all };
}

/** The row below a machine's own. */
export class PlanRow {
  readonly element: HTMLElement;
  private readonly places: HTMLElement[];
  private readonly tiers: HTMLElement[];

  constructor(pattern: HTMLTemplateElement, readonly id: string) {
    this.element = (pattern.content.cloneNode(true) as DocumentFragment).firstElementChild as HTMLElement;
    this.element.id = id;
    this.places = [...this.element.querySelectorAll<HTMLElement>("[data-fact]")];
    this.tiers = [...this.element.querySelectorAll<HTMLElement>("[data-tier]")];
  }

  fill(plan: PlanView, worker: Machine): void {
    const said = { ...facts(plan, worker.step_seconds), ...exchangeFacts(worker) };
    this.element.querySelector("[role=region]")!.setAttribute("aria-label", `How ${worker.name} trains`);
    for (const place of this.places) {
      const text = said[place.dataset.fact!] ?? "";
      if (place.textContent !== text) place.textContent = text;
    }
    const parts = shares(plan);
    for (const tier of this.tiers) {
      const part = parts[tier.dataset.tier as Tier];
      tier.hidden = part === 0;
      tier.style.setProperty("--part", part.toFixed(4));
    }
  }
}
