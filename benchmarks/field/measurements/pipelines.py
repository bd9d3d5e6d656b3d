"""Measure full copies against pipelines, whose slow boundaries they do not have."""

from math import inf

from field_bench import LINES, WORKERS, FieldBench, report
from field_cells import Cell
from field_model import MICROBATCH_SEQUENCES, MICROBATCHES, MODEL, SHAPE, STEP_TOKENS
from links import NAMED_MODELS, Shape, boundary_seconds, pipeline_ratio, scale_pipeline_line

from barnraise.planning.lines import HOME_LINE, Line

PIPELINE_STEP_TOKENS = MICROBATCHES * MICROBATCH_SEQUENCES * MODEL.context
SCHEDULES_MODEL = "GPT 1.3B"  # whose pipelines are measured with all schedules


def measure_pipelines(bench: FieldBench) -> None:
    """Measure full copies against pipelines, where the ratio should be the closed form's."""
    ours = bench.run(bench.our_cell(LINES["100mbit"], steps=bench.extent.calibration_steps))
    for shape in NAMED_MODELS:
        if shape.name not in bench.extent.pipeline_models:
            continue
        for bits in (16, 8):
            _measure_pipeline_rates(bench, shape, bits, ours.tokens_per_second)


def _measure_pipeline_rates(bench: FieldBench, shape: Shape, bits: int, ours: float) -> None:
    """Measure a model's pipeline on all lines, from the fastest to the slowest.

    Args:
        bench: runs the cells.
        shape: the named model.
        bits: of a value that is sent over a boundary.
        ours: tokens per second of four full copies.
    """
    schedule = bench.extent.schedules[0]
    step_seconds = inf  # on the line before, which is faster
    travelled = 0.0  # seconds of such a step for which its messages travelled
    for rate in sorted(bench.extent.pipeline_rates, reverse=True):
        line = Line(f"{rate:g} Mb/s", rate, rate, HOME_LINE.round_trip_seconds)
        scaled = scale_pipeline_line(line, _pipeline_flops(bench, shape), shape, SHAPE)
        travelling = boundary_seconds(PIPELINE_STEP_TOKENS, SHAPE.width, bits / 8, scaled)
        if travelling > bench.extent.pipeline_step_seconds and step_seconds < inf:
            # A step takes at least as much longer as its messages do. That favours the
            # pipeline: while it fills and drains, it waits longer for them, too.
            step_seconds += travelling - travelled
            kind = "extrapolated"
        else:
            steps = int(bench.extent.pipeline_seconds / travelling)
            steps = min(max(steps, 1), bench.extent.pipeline_steps)
            schedule, step_seconds = _measure_pipeline(bench, shape, scaled, bits, steps)
            kind = "measured"
        travelled = travelling
        tokens_per_second = PIPELINE_STEP_TOKENS / step_seconds
        ratio = ours / tokens_per_second if tokens_per_second else None
        row = {
            "model": shape.name,
            "megabits": rate,
            "bits": bits,
            "schedule": schedule,
            "kind": kind,
            "scaled_megabits": round(scaled.up_megabits, 3),
            "tokens_per_second": round(tokens_per_second, 1),
            "ratio": ratio and round(ratio, 2),
            "closed_form": round(pipeline_ratio(WORKERS, shape, bits / 8, rate * 1e6), 2),
        }
        bench.findings.pipeline.append(row)
        report("pipeline", row)


def _measure_pipeline(
    bench: FieldBench, shape: Shape, scaled: Line, bits: int, steps: int
) -> tuple[str, float]:
    """Return the faster schedule of a pipeline, and the seconds of its steps."""
    extent = bench.extent
    schedules = extent.schedules if shape.name == SCHEDULES_MODEL else extent.schedules[:1]
    step_seconds = {}
    for schedule in schedules:
        options = {"bits": bits, "schedule": schedule}
        cell = Cell("torch_pipeline", scaled, extent.slow_seconds * 3, steps, options=options)
        step_seconds[schedule] = bench.run(cell).mean_step_seconds
    # A boundary that limits delays 1F1B, which has few microbatches under way; where arithmetic
    # limits, the two are alike. The faster one counts.
    return min(step_seconds.items(), key=lambda each: each[1])


def _pipeline_flops(bench: FieldBench, named: Shape) -> float:
    """Return the FLOP/s of one worker as the named model's closed form counts them.

    Eight for each token and parameter, with as many parameters per L·d² as the named model has.
    """
    per_shape = named.parameters / (named.layers * named.width**2)
    parameters = per_shape * SHAPE.layers * SHAPE.width**2
    return 8 * parameters * STEP_TOKENS / bench.step_seconds_alone
