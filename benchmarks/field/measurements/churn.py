"""Kill and restart workers in turn, and see which systems go on."""

from dataclasses import replace

from field_bench import EXTERNAL, LINES, FieldBench, report
from field_cells import Cell
from links import scale_line


def measure_churn(bench: FieldBench) -> None:
    """Kill and restart workers in turn, and see what goes on."""
    between, seconds = bench.extent.churn
    line = scale_line(LINES["1000mbit"], bench.flops)
    for system in ("ours_updates", "torch_ddp", *EXTERNAL):
        options = {"round_steps": bench.extent.round_steps}
        cell = Cell(system, line, seconds, 0, 2, options)
        if system == "ours_updates":
            cell = bench.our_cell(LINES["1000mbit"], seconds=seconds)
        result = bench.run(replace(cell, churn=between))
        bench.findings.churn[system] = {
            "outcome": result.outcome,
            "tokens_per_second": round(result.tokens_per_second, 1),
            "loss": round(result.losses[-1][2], 3) if result.losses else None,
        }
        report("churn", {"system": system} | bench.findings.churn[system])
