"""Test the runtime model against closed forms and against the limits that it must obey."""

import math
from dataclasses import replace

import pytest

from barnraise.planning.lines import CLUSTER_LINE, HOME_LINE, LINES, Line
from barnraise.planning.mixing_topology import COMPLETE, EXPONENTIAL, RING
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.planning.round_schedule import RoundSchedule
from barnraise.planning.runtime_model import (
    StepTime,
    Swarm,
    choose_strategy,
    expected_maximum,
    predict_data_parallel,
    predict_decentralized_adam,
    predict_updates,
)

GPU_STEP = StepTime(0.5, 0.0, 8192)
GPT2 = Swarm(4, 124_000_000, HOME_LINE, GPU_STEP)
RTX_3090 = 35e12


def test_home_line_is_the_global_median_and_the_first_choice():
    assert LINES[0] is HOME_LINE
    assert (HOME_LINE.up_megabits, HOME_LINE.down_megabits) == (15, 112)
    assert HOME_LINE.round_trip_seconds == 0.023
    assert HOME_LINE.up_bytes == 1_875_000
    assert str(HOME_LINE) == "15 Mb/s up, 112 down" and str(LINES[1]) == "100 Mb/s both ways"


@pytest.mark.parametrize("rates", [(0, 10), (10, 0), (-1, 10), (math.nan, 10), (10, math.inf)])
def test_line_without_rate_is_refused_in_a_sentence(rates):
    with pytest.raises(ValueError, match="state a rate above zero"):
        Line("x", *rates)
    with pytest.raises(ValueError, match="state 0 or more"):
        Line("x", 1, 1, -0.1)


def test_data_parallel_step_costs_the_ring_and_the_slowest_machine():
    prediction = predict_data_parallel(GPT2)
    sent = 2 * 3 / 4 * 4 * 124_000_000
    assert prediction.step_seconds == pytest.approx(0.5 + sent / 1_875_000 + 6 * 0.023)
    assert prediction.bytes_per_token == pytest.approx(sent / 8192)
    uneven = replace(GPT2, step=StepTime(0.5, 0.1, 8192))
    assert predict_data_parallel(uneven).step_seconds - prediction.step_seconds == pytest.approx(
        0.1029, abs=1e-4
    ), "the expected largest of four normal values is 1.0294 deviations above the mean"


def test_decentralised_step_is_the_longer_of_arithmetic_and_message():
    slow = predict_decentralized_adam(GPT2, EXPONENTIAL, 8)
    assert slow.step_seconds == pytest.approx(124e6 / 1_875_000 + 0.023)
    fast = predict_decentralized_adam(replace(GPT2, line=CLUSTER_LINE), EXPONENTIAL, 32)
    assert fast.step_seconds == 0.5 and fast.utilisation == 1.0
    assert predict_decentralized_adam(GPT2, COMPLETE, 8).step_seconds == pytest.approx(
        3 * 124e6 / 1_875_000 + 0.023
    )
    rare = predict_decentralized_adam(GPT2, EXPONENTIAL, 8, interval=16)
    assert rare.step_seconds == pytest.approx(slow.step_seconds / 16)
    assert rare.bytes_per_token == pytest.approx(slow.bytes_per_token / 16)


def test_waiting_for_neighbours_costs_less_than_waiting_for_all():
    swarm = Swarm(32, 1_000_000, CLUSTER_LINE, StepTime(0.5, 0.1, 8192))
    waits_for_all = predict_data_parallel(swarm).step_seconds
    waits_for_one = predict_decentralized_adam(swarm, RING, 32).step_seconds
    assert 0.5 < waits_for_one < waits_for_all
    assert waits_for_one == predict_decentralized_adam(swarm, RING, 32).step_seconds, "it is pure"


def test_updates_never_wait_on_a_home_line():
    prediction = predict_updates(GPT2)
    assert prediction.utilisation == 1.0 and prediction.step_seconds == 0.5
    assert prediction.bytes_per_token * 8192 / 0.5 <= 0.8 * HOME_LINE.up_bytes
    fixed = RoundSchedule(10, QuantizationScheme.parse("dense8"))
    crowd = predict_updates(replace(GPT2, machines=1000), fixed)
    assert crowd.utilisation < 1.0, "each line carries everybody's updates"


def test_one_machine_sends_nothing():
    alone = replace(GPT2, machines=1)
    for prediction in (
        predict_updates(alone),
        predict_data_parallel(alone),
        predict_decentralized_adam(alone, RING, 32),
    ):
        assert prediction.bytes_per_token == 0 and prediction.step_seconds == pytest.approx(0.5)


def test_auto_chooses_updates_at_home_and_frequent_averaging_in_a_cluster():
    home, baseline = choose_strategy(GPT2), predict_data_parallel(GPT2)
    assert home.chosen.strategy == "updates"
    assert home.chosen.tokens_per_second > 100 * baseline.tokens_per_second
    assert "times the tokens per second of synchronous data parallelism" in home.reason
    in_cluster = replace(GPT2, line=CLUSTER_LINE, step=StepTime(0.5, 0.02, 8192))
    cluster, baseline = choose_strategy(in_cluster), predict_data_parallel(in_cluster)
    assert cluster.chosen.strategy == "decentralized-adam"
    assert cluster.chosen.tokens_per_second > baseline.tokens_per_second
    assert (cluster.chosen.topology, cluster.chosen.bits) != ("", 0)
    perfect = replace(GPT2, line=Line("NVLink", 4_000_000, 4_000_000, 0.0))
    exact = choose_strategy(perfect).chosen
    assert (exact.strategy, exact.topology, exact.bits) == ("decentralized-adam", "complete", 32)
    alone = choose_strategy(replace(GPT2, machines=1)).chosen
    assert (alone.strategy, alone.utilisation) == ("updates", 1.0)


def test_choice_never_trains_less_than_95_percent_of_the_fastest():
    for machines in (2, 3, 5, 300):
        for line in (*LINES, CLUSTER_LINE):
            choice = choose_strategy(replace(GPT2, machines=machines, line=line))
            possible = [each for each in choice.predictions if each.strategy != "data-parallel"]
            fastest = max(each.tokens_per_second for each in possible)
            assert choice.chosen.tokens_per_second >= 0.95 * fastest


def test_expected_maximum_matches_known_values():
    assert expected_maximum(2.0, 0.5, 1) == 2.0
    assert expected_maximum(0.0, 1.0, 2) == pytest.approx(1 / math.sqrt(math.pi), abs=1e-4)
    assert expected_maximum(0.0, 1.0, 10) == pytest.approx(1.5388, abs=1e-3)
