// The machines' speeds on top of each other. Pure.

import { findFirstAfter } from "./chartAxes";
import type { Point, WorkerCurve } from "./types";

const SHOWN_OTHERS = 0.02; // share of the highest total from which other machines get a layer

/** One machine's layer of the stacked chart; its upper edge includes the layers below it. */
export interface StackedRate {
  id: string;
  name: string;
  tops: Point[];
}

/**
 * Stack the machines' speeds, the top layer first, on those points of `total` that they cover.
 *
 * What the listed machines do not account for is the layer of the other machines.
 */
export function stackRates(total: Point[], machines: WorkerCurve[]): StackedRate[] {
  const measured = machines.filter((machine) => machine.rates.length);
  const last = Math.max(...measured.map((machine) => machine.rates.at(-1)![0]));
  const covered = total.filter(([time]) => time <= last);
  if (!covered.length) return [];
  const tops = measured.map((machine): StackedRate => {
    return { id: machine.id, name: machine.name, tops: [] };
  });
  const others: StackedRate = { id: "others", name: "Others", tops: [] };
  let mostOthers = 0;
  for (const [time, sum] of covered) {
    let top = 0;
    measured.forEach(({ rates }, i) => {
      const next = findFirstAfter(rates, time);
      const rate = rates[next - 1];
      const interval = (rates[1]?.[0] ?? Infinity) - rates[0]![0];
      // A machine that has stopped reporting adds nothing.
      if (rate && (time - rate[0] <= 2 * interval || next < rates.length)) top += rate[1];
      tops[i]!.tops.push([time, top]);
    });
    others.tops.push([time, Math.max(sum, top)]);
    mostOthers = Math.max(mostOthers, sum - top);
  }
  const highest = covered.reduce((most, [, sum]) => Math.max(most, sum), 0);
  if (mostOthers > SHOWN_OTHERS * highest) tops.push(others);
  return tops.reverse();
}
