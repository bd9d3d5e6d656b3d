"""Measure ours as decentralised Adam against decent-dp, on the same batches."""

from statistics import median

from field_bench import FieldBench, report
from field_cells import Cell, CellResult


def measure_equal_work(bench: FieldBench) -> None:
    """Measure ours as decentralised Adam against decent-dp on the same batches, in turns."""
    pairs = [_measure_equal_pair(bench) for _ in range(bench.extent.repeats)]
    # Their first step builds buckets and connects processes.
    times = [[sum(result.step_seconds[2:]) for result in pair] for pair in pairs]
    ratios = [round(ours / theirs, 3) for ours, theirs in times if theirs]
    ours, theirs = pairs[-1]
    bench.findings.equal_work = {
        "step_time_ratio": median(ratios) if ratios else None,
        "step_time_ratios": ratios,
        "losses": [[step, round(loss, 4)] for _, step, loss in ours.losses],
        "decent_dp_losses": [[step, round(loss, 4)] for _, step, loss in theirs.losses],
        "messages": [figures.get("messages") for figures in ours.figures],
        "bytes": [max(ours.bytes_sent), max(theirs.bytes_sent)],
        # Of all workers; of the relay, which passes QUIC's small packets and TCP's large ones.
        "cpu_seconds": [[_sum_cpu_seconds(result) for result in pair] for pair in pairs],
        "relay_seconds": [[round(each.relay_seconds, 2) for each in pair] for pair in pairs],
    }
    report("equal work", bench.findings.equal_work)


def _measure_equal_pair(bench: FieldBench) -> tuple[CellResult, CellResult]:
    """Measure ours and decent-dp once, one right after the other."""
    steps = bench.extent.equal_steps
    every = max(1, steps // 4)
    theirs = bench.run(Cell("decent_dp_adam", None, 300.0, steps, every, {"from_first_step": True}))
    return bench.run(Cell("ours_mixing", None, 300.0, steps, every)), theirs


def _sum_cpu_seconds(result: CellResult) -> float:
    """Return the CPU seconds of all workers' steps."""
    return round(sum(float(each.get("cpu_seconds", 0)) for each in result.figures), 2)
