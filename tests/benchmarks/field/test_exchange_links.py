"""Test the arithmetic that scales lines for `make bench-exchange`."""

import math
import sys

import pytest
from helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks" / "field"))

from links import (
    NAMED_MODELS,
    RTX_3090_FLOPS,
    LinkError,
    Shape,
    boundary_seconds,
    observe_line,
    pipeline_ratio,
    scale_line,
    scale_pipeline_line,
)

from barnraise.planning.lines import HOME_LINE, Line
from barnraise.planning.runtime_model import StepTime, Swarm, predict_data_parallel

CPU_FLOPS = 20e9
HERE = Shape("here", 2, 64, 120_000)
GPT_1_3B = NAMED_MODELS[1]


def test_scaled_line_preserves_the_ratio_of_bytes_to_arithmetic():
    """Data parallelism computes for as much of a step here as the GPU behind the real line."""
    tokens = 8192

    def utilisation(parameters: float, flops: float, line: Line) -> float:
        step = StepTime(6 * parameters * tokens / flops, 0.0, tokens)
        no_delay = Line(line.name, line.up_megabits, line.down_megabits)
        return predict_data_parallel(Swarm(4, int(parameters), no_delay, step)).utilisation

    real = utilisation(GPT_1_3B.parameters, RTX_3090_FLOPS, HOME_LINE)
    scaled = utilisation(HERE.parameters, CPU_FLOPS, scale_line(HOME_LINE, CPU_FLOPS))
    assert scaled == pytest.approx(real, rel=1e-6)
    assert scale_line(HOME_LINE, CPU_FLOPS).round_trip_seconds == HOME_LINE.round_trip_seconds


def test_scaled_pipeline_line_preserves_its_own_ratio():
    line = Line("x", 20, 20)
    scaled = scale_pipeline_line(line, CPU_FLOPS, GPT_1_3B, HERE)

    def boundary_over_compute(shape: Shape, flops: float, megabits: float) -> float:
        blocks = 12 * shape.layers * shape.width**2  # the parameters that a boundary is about
        return (2 * shape.width / (megabits * 1e6 / 8)) / (8 * blocks / flops)

    assert boundary_over_compute(HERE, CPU_FLOPS, scaled.up_megabits) == pytest.approx(
        boundary_over_compute(GPT_1_3B, RTX_3090_FLOPS, line.up_megabits)
    )
    assert scaled.up_megabits > scale_line(line, CPU_FLOPS).up_megabits


@pytest.mark.parametrize(
    ("shape", "element_bytes", "megabits", "expected"),
    [
        (GPT_1_3B, 2, 20, 22),
        (GPT_1_3B, 1, 20, 11),
        (GPT_1_3B, 1, 1000, 1),
        (NAMED_MODELS[2], 2, 100, 1.7),
    ],
)
def test_closed_form_of_the_crossover_is_as_published(shape, element_bytes, megabits, expected):
    assert pipeline_ratio(4, shape, element_bytes, megabits * 1e6) == pytest.approx(
        expected, rel=0.03
    )


def test_observed_line_has_the_rate_that_bytes_had():
    line = Line("8 Mb/s", 8, 8, 0.02)
    observed = observe_line(line, 1_000_000, 2, 1.29)  # 1.25 s besides two delays
    assert observed.up_megabits == observed.down_megabits == pytest.approx(6.4)
    assert observe_line(line, 1_000_000, 2, 0.01).up_megabits == 8  # never above the nominal rate


def test_boundary_carries_activations_and_then_gradients():
    line = Line("8 Mb/s", 8, 8)  # a million bytes a second
    assert boundary_seconds(1000, 64, 2, line) == pytest.approx(2 * 0.128)
    assert boundary_seconds(1000, 64, 1, line) == pytest.approx(0.128)


@pytest.mark.parametrize("flops", [0.0, -1.0, math.nan, math.inf])
def test_unmeasured_machine_is_refused_in_a_sentence(flops):
    with pytest.raises(LinkError, match="no line can be scaled"):
        scale_line(HOME_LINE, flops)
