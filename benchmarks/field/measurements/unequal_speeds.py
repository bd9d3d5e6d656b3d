"""Measure machines of unequal speeds against the sum of their speeds."""

from field_bench import LINES, FieldBench, report
from field_cells import Cell, with_rests

SPEEDS = (1.0, 2.0, 4.0, 7.0)


def measure_unequal_speeds(bench: FieldBench) -> None:
    """Measure machines of speeds 1:2:4:7 against the sum of their speeds."""
    seconds = bench.extent.steady_seconds
    alone = bench.run(with_rests(Cell("alone", None, seconds), SPEEDS))
    ours = bench.run(with_rests(bench.our_cell(LINES["100mbit"], seconds=seconds), SPEEDS))
    share = ours.tokens_per_second / alone.tokens_per_second
    bench.findings.unequal_of_sum = round(share, 3)
    bench.findings.unequal_rates = {"alone": alone.rates, "ours": ours.rates}
    report("unequal", {"of_sum": bench.findings.unequal_of_sum, "rates": ours.rates})
