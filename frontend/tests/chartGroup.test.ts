import { describe, expect, test } from "vitest";
import { ChartGroup, type GroupedChart, type Section } from "../src/chartGroup";

/** A chart that records whether it had to draw a new section. */
class RecordedChart implements GroupedChart {
  readonly draws: boolean[] = [];

  constructor(public extent: Section | null) {}

  prepare(): void {}

  draw(hasNewRange: boolean): void {
    this.draws.push(hasNewRange);
  }

  showPosition(): void {}
}

function createGroup(...charts: RecordedChart[]): ChartGroup {
  const group = new ChartGroup();
  for (const chart of charts) group.add(chart);
  return group;
}

describe("ChartGroup", () => {
  test("shows what all charts have", () => {
    const group = createGroup(new RecordedChart([10, 50]), new RecordedChart(null));
    expect(group.section).toEqual([10, 50]);
    group.add(new RecordedChart([30, 90]));
    expect(group.section).toEqual([10, 90]);
    expect(createGroup(new RecordedChart(null)).section).toEqual([0, 1]);
    expect(createGroup(new RecordedChart([5, 5])).section).toEqual([5, 6]);
  });

  test("draws all charts again only when their section has changed visibly", () => {
    const chart = new RecordedChart([0, 1000]);
    const group = createGroup(chart);
    for (const end of [1000, 1000.2, 1000.4, 1000.6, 1000.7]) {
      chart.extent = [0, end];
      group.draw();
    }
    expect(chart.draws).toEqual([true, false, false, true, false]);
  });

  test("zooms around a place and back to everything", () => {
    const group = createGroup(new RecordedChart([0, 100]));
    group.zoomBy(0.5, 20);
    expect(group.section).toEqual([10, 60]);
    group.zoomBy(4);
    expect(group.zoom).toBeNull();
    group.zoomTo([7, 7]);
    expect(group.section).toEqual([0, 100]);
  });
});
