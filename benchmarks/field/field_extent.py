"""How much `make bench-exchange` measures, in full and with `--quick`."""

from dataclasses import dataclass

from links import NAMED_MODELS


@dataclass(frozen=True)
class Extent:
    """How much is measured.

    Attributes:
        calibration_steps: of each worker alone.
        pipeline_steps: of each pipeline, at most.
        pipeline_seconds: for which a pipeline's messages travel, at most; a pipeline makes fewer
            steps on a slow line, and at least one.
        pipeline_step_seconds: for which the messages of one step may travel; on slower lines the
            step is extrapolated from the next faster line.
        schedules: of pipelines. All are measured for GPT 1.3B, and the faster one counts; other
            models are measured with the first one.
        pipeline_models: names of the models of the crossover chart.
        pipeline_rates: Mb/s of the crossover chart.
        target_loss: nats a token, to which every system trains.
        curve_steps: in which synchronous systems reach the target.
        loss_seconds: that a system may take for the target on one line.
        home_seconds: that ours may take on the home line, where one round takes minutes.
        alone_seconds: for which each machine trains alone.
        slow_seconds: for the few steps of a slow system on one line.
        hivemind_seconds: for its epochs on one line, and without a limit on the line.
        loss_lines: names of the lines.
        only_ours: whether the time to the target is measured of ours and of one machine alone only.
        round_steps: H of DiLoCo.
        churn: seconds between two kills, and seconds in all.
        equal_steps: of decentralised Adam against decent-dp.
        steady_seconds: of utilisation and unequal speeds.
        model_steps: of each measurement that the runtime model is compared with.
        repeats: of the comparison on equal work, and of what is far from the runtime model; the
            median counts.
        model_shares: steps' arithmetic that all weights take on the lines of the runtime model.
    """

    calibration_steps: int
    pipeline_steps: int
    pipeline_seconds: float
    pipeline_step_seconds: float
    schedules: tuple[str, ...]
    pipeline_models: tuple[str, ...]
    pipeline_rates: tuple[float, ...]
    target_loss: float
    curve_steps: int
    loss_seconds: float
    home_seconds: float
    alone_seconds: float
    slow_seconds: float
    hivemind_seconds: float
    loss_lines: tuple[str, ...]
    round_steps: int
    churn: tuple[float, float]
    equal_steps: int
    steady_seconds: float
    model_steps: int
    repeats: int = 3
    only_ours: bool = False
    model_shares: tuple[float, ...] = (1.0,)


FULL = Extent(
    calibration_steps=40,
    pipeline_steps=3,
    pipeline_seconds=8.0,
    pipeline_step_seconds=30.0,
    schedules=("gpipe", "1f1b"),
    pipeline_models=tuple(shape.name for shape in NAMED_MODELS),
    pipeline_rates=(15, 20, 50, 100, 400, 1000),
    target_loss=2.6,
    curve_steps=150,
    loss_seconds=160.0,
    home_seconds=420.0,
    alone_seconds=160.0,
    slow_seconds=120.0,
    hivemind_seconds=90.0,
    loss_lines=("home", "100mbit", "1000mbit"),
    round_steps=10,
    churn=(120.0, 600.0),
    equal_steps=60,
    steady_seconds=60.0,
    model_steps=18,
    model_shares=(0.3, 1.0, 3.0),
)
QUICK = Extent(
    calibration_steps=8,
    pipeline_steps=1,
    pipeline_seconds=30.0,
    pipeline_step_seconds=60.0,
    schedules=("gpipe",),  # the faster one of the two in every cell measured so far
    pipeline_models=("GPT 1.3B",),
    pipeline_rates=(20, 400),
    target_loss=3.5,
    curve_steps=30,
    loss_seconds=62.0,
    home_seconds=62.0,
    alone_seconds=15.0,
    slow_seconds=20.0,
    hivemind_seconds=20.0,
    loss_lines=("100mbit",),
    round_steps=10,
    churn=(4.0, 9.0),
    equal_steps=12,
    steady_seconds=17.0,
    model_steps=12,
)
