"""Measure the share of time in which our workers compute."""

from dataclasses import replace
from statistics import fmean

from field_bench import LINES, FieldBench, report
from step_predictions import compare_our_steps


def measure_utilisation(bench: FieldBench) -> None:
    """Measure the share of time in which our workers compute."""
    for name in ("50mbit", "home"):
        cell = bench.our_cell(LINES[name], seconds=bench.extent.steady_seconds)
        result = bench.run(replace(cell, snapshot_steps=0))
        shares = [figures.get("computing", 0.0) for figures in result.figures]
        bench.findings.utilisation[name] = round(fmean(shares), 4)
        compare_our_steps(bench, name, result)
    report("utilisation", bench.findings.utilisation)
