"""Measure on a real line of 100 Mb/s, which flatters everyone on a slow processor."""

from field_bench import LINES, FieldBench, limit_uplink, report
from field_cells import Cell


def measure_unscaled(bench: FieldBench) -> None:
    """Measure on a real line of 100 Mb/s, which flatters everyone on a slow processor."""
    line = LINES["100mbit"]
    steps = bench.extent.calibration_steps
    cells = {
        "ours_updates": (steps, limit_uplink(line)),
        "torch_ddp": (steps, {}),
        "decent_dp_adam": (steps, {}),
        # One of its steps has eight times as many sequences.
        "torch_pipeline": (bench.extent.pipeline_steps, {"bits": 16, "schedule": "1f1b"}),
    }
    for system, (made, options) in cells.items():
        result = bench.run(Cell(system, line, 120.0, made, 0, options))
        bench.findings.unscaled[system] = round(result.tokens_per_second, 1)
    report("unscaled 100 Mb/s", bench.findings.unscaled)
