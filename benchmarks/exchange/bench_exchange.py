"""Measure the exchange against the systems that people would otherwise use: `make bench-exchange`.

Four workers in four network namespaces train one small GPT on lines that are scaled to this
machine's arithmetic (`links.py`). See docs/benchmarks/exchange.md. The script prints a line for
each measurement, and one JSON object as its last line. `--quick`: a small version of all.

Exit code 2: something that the benchmark needs is missing; one sentence says what.
"""

import argparse
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from math import inf
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

import torch
from child_processes import ChildProcesses
from drill_worker import MIRROR, RUN
from field_cells import Cell, CellResult, FieldRunner, with_rests
from field_environment import InstallError, install_systems
from field_findings import Findings, summarise
from field_model import MODEL, SHAPE, STEP_TOKENS
from field_network import FieldNetwork, NamespaceError
from field_plots import draw_plots
from links import (
    NAMED_MODELS,
    LinkError,
    Shape,
    boundary_seconds,
    leave_room_for_packets,
    observe_line,
    pipeline_ratio,
    scale_line,
    scale_pipeline_line,
)
from systems import ours_updates
from systems.torch_pipeline import MICROBATCH_SEQUENCES, MICROBATCHES

from barnraise.ledger.blob_store import BlobStore
from barnraise.planning.lines import BITS_PER_BYTE, HOME_LINE, MEGABIT, Line
from barnraise.planning.mixing_topology import EXPONENTIAL
from barnraise.planning.runtime_model import (
    Prediction,
    StepTime,
    Swarm,
    predict_data_parallel,
    predict_decentralized_adam,
    predict_updates,
)
from barnraise.spec import TextSpec
from barnraise.text import shards
from barnraise.text.stdlib_text import read_stdlib

WORKERS = 4
BUILD = Path(__file__).resolve().parents[2] / "build" / "field"
EXTERNAL = ("decent_dp_adam", "hivemind_optimizer", "torchft_diloco")
SPEEDS = (1.0, 2.0, 4.0, 7.0)
LINES = {
    "home": HOME_LINE,
    "50mbit": Line("50 Mb/s", 50, 50, 0.023),
    "100mbit": Line("100 Mb/s", 100, 100, 0.023),
    "1000mbit": Line("1,000 Mb/s", 1000, 1000, 0.023),
}
PIPELINE_STEP_TOKENS = MICROBATCHES * MICROBATCH_SEQUENCES * MODEL.context
SCHEDULES_MODEL = "GPT 1.3B"  # whose pipelines are measured with all schedules
UPLINK_SHARE = 0.9  # of the line, as scaled: our workers' own limit
SNAPSHOT_STEPS = 8  # between two snapshots of the weights, for losses over time
CURVE_STEPS = 4  # the same for curves of few steps, which end shortly after the target
CURVE_SECONDS = 4.0  # between two losses of a curve in the findings, at least
MIN_STEPS = 3  # that a slow system must make before its steps are multiplied
MAX_MODEL_ERROR = 0.2  # of the runtime model; what is farther off is measured again
# The parts of the benchmark, in order.
PARTS = ("pipelines", "loss", "equal", "model", "utilisation", "unequal", "churn", "unscaled")


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


class ExchangeBenchmark:
    """The measurements, one method each."""

    def __init__(self, runner: FieldRunner, extent: Extent) -> None:
        """Measure nothing yet."""
        self._runner = runner
        self._extent = extent
        self.findings = Findings()
        self._alone: CellResult | None = None

    # ---- calibration --------------------------------------------------------------------------

    def calibrate(self) -> None:
        """Measure what each worker computes alone, while all four do."""
        result = self._run(Cell("alone", None, 300.0, steps=self._extent.calibration_steps))
        self._alone = result
        self.findings.machine = {
            "tokens_per_second_alone": round(fmean(result.rates), 1),
            "step_seconds_alone": round(self.step_seconds_alone, 4),
            "flops_alone": round(self.flops / 1e9, 2),
            "parameters": MODEL.parameters,
            "step_tokens": STEP_TOKENS,
            "load": [round(value, 1) for value in os.getloadavg()],
        }
        report("alone", self.findings.machine)

    @property
    def step_seconds_alone(self) -> float:
        """Return the mean seconds of a step without exchange, over all workers."""
        assert self._alone is not None
        return STEP_TOKENS / fmean(self._alone.rates)

    @property
    def step_time(self) -> StepTime:
        """Return the time of a step without exchange, as the runtime model wants it."""
        assert self._alone is not None
        return StepTime(self.step_seconds_alone, self._alone.step_deviation, STEP_TOKENS)

    @property
    def flops(self) -> float:
        """Return the FLOP/s of one worker: six for each parameter and token."""
        return 6 * MODEL.parameters * STEP_TOKENS / self.step_seconds_alone

    def _pipeline_flops(self, named: Shape) -> float:
        """Return the FLOP/s of one worker as the named model's closed form counts them.

        Eight for each token and parameter, with as many parameters per L·d² as the named model has.
        """
        per_shape = named.parameters / (named.layers * named.width**2)
        parameters = per_shape * SHAPE.layers * SHAPE.width**2
        return 8 * parameters * STEP_TOKENS / self.step_seconds_alone

    # ---- 1. pipelines -------------------------------------------------------------------------

    def measure_pipelines(self) -> None:
        """Measure full copies against pipelines, where the ratio should be the closed form's."""
        ours = self._run(self._measure_ours(LINES["100mbit"], steps=self._extent.calibration_steps))
        for shape in NAMED_MODELS:
            if shape.name not in self._extent.pipeline_models:
                continue
            for bits in (16, 8):
                self._measure_pipeline_rates(shape, bits, ours.tokens_per_second)

    def _measure_pipeline_rates(self, shape: Shape, bits: int, ours: float) -> None:
        """Measure a model's pipeline on all lines, from the fastest to the slowest.

        Args:
            shape: the named model.
            bits: of a value that is sent over a boundary.
            ours: tokens per second of four full copies.
        """
        schedule = self._extent.schedules[0]
        step_seconds = inf  # on the line before, which is faster
        travelled = 0.0  # seconds of such a step for which its messages travelled
        for rate in sorted(self._extent.pipeline_rates, reverse=True):
            line = Line(f"{rate:g} Mb/s", rate, rate, HOME_LINE.round_trip_seconds)
            scaled = scale_pipeline_line(line, self._pipeline_flops(shape), shape, SHAPE)
            travelling = boundary_seconds(PIPELINE_STEP_TOKENS, SHAPE.width, bits / 8, scaled)
            if travelling > self._extent.pipeline_step_seconds and step_seconds < inf:
                # A step takes at least as much longer as its messages do. That favours the
                # pipeline: while it fills and drains, it waits longer for them, too.
                step_seconds += travelling - travelled
                kind = "extrapolated"
            else:
                steps = int(self._extent.pipeline_seconds / travelling)
                steps = min(max(steps, 1), self._extent.pipeline_steps)
                schedule, step_seconds = self._measure_pipeline(shape, scaled, bits, steps)
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
            self.findings.pipeline.append(row)
            report("pipeline", row)

    def _measure_pipeline(
        self, shape: Shape, scaled: Line, bits: int, steps: int
    ) -> tuple[str, float]:
        """Return the faster schedule of a pipeline, and the seconds of its steps."""
        extent = self._extent
        schedules = extent.schedules if shape.name == SCHEDULES_MODEL else extent.schedules[:1]
        step_seconds = {}
        for schedule in schedules:
            options = {"bits": bits, "schedule": schedule}
            cell = Cell("torch_pipeline", scaled, extent.slow_seconds * 3, steps, options=options)
            step_seconds[schedule] = self._run(cell).mean_step_seconds
        # A boundary that limits delays 1F1B, which has few microbatches under way; where arithmetic
        # limits, the two are alike. The faster one counts.
        return min(step_seconds.items(), key=lambda each: each[1])

    # ---- 2. wall-clock to one loss ------------------------------------------------------------

    def measure_loss(self) -> None:
        """Measure how long each system takes to the same validation loss on each line."""
        self._measure_alone()
        if self._extent.only_ours:
            for name in self._extent.loss_lines:
                self._measure_asynchronous("ours_updates", name)
            return
        rounds = {"round_steps": self._extent.round_steps}
        curve_steps = self._extent.curve_steps
        # DiLoCo learns less from each step, so its curve is longer.
        steps_needed = {
            "torch_ddp": self._measure_curve("torch_ddp", curve_steps, {}),
            "decent_dp_adam": self._measure_curve("decent_dp_adam", curve_steps, {}),
            "torchft_diloco": self._measure_curve("torchft_diloco", curve_steps * 9 // 5, rounds),
        }
        hivemind = self._measure_curve("hivemind_optimizer", 0, {})
        for name in self._extent.loss_lines:
            self._measure_asynchronous("ours_updates", name)
            for system, (steps, cell) in steps_needed.items():
                self._measure_synchronous(system, name, steps, cell)
            self._measure_hivemind(name, steps_needed["torch_ddp"][0], hivemind[1])

    def _measure_alone(self) -> None:
        """Train each machine alone, which needs no line at all."""
        seconds = self._extent.alone_seconds
        result = self._run(Cell("alone", None, seconds, 0, SNAPSHOT_STEPS))
        self.findings.alone = {
            "seconds": result.seconds_to_loss(self._extent.target_loss),
            "steps": result.steps_to_loss(self._extent.target_loss),
            "last_loss": round(result.losses[-1][2], 3) if result.losses else None,
        }
        report("one machine alone", self.findings.alone)
        self.findings.alone["losses"] = _thin_out(result.losses)

    def _measure_curve(
        self, system: str, steps: int, options: dict[str, Any]
    ) -> tuple[float | None, CellResult]:
        """Train without a limit on the line; steps to a loss do not depend on it.

        Args:
            system: the adapter.
            steps: to make at most; 0: as many as fit into the time of hivemind.
            options: of the adapter.
        """
        extent = self._extent
        seconds = extent.loss_seconds * 4 if steps else extent.hivemind_seconds
        snapshot_steps = CURVE_STEPS if steps else 0
        result = self._run(Cell(system, None, seconds, steps, snapshot_steps, options))
        needed = result.steps_to_loss(extent.target_loss)
        last = result.losses[-1][2] if result.losses else None
        report("curve", {"system": system, "steps": needed, "last": last, "is": result.outcome})
        return needed, result

    def _measure_hivemind(self, line_name: str, steps: float | None, unlimited: CellResult) -> None:
        """Time hivemind's epochs on a line and multiply them.

        An epoch averages one step of every worker, so it learns what a step of synchronous training
        does, or less, because its updates are delayed. It is counted with as many epochs as DDP
        needs steps, which favours it.

        Args:
            line_name: of the line.
            steps: that DDP needs to the target.
            unlimited: what it did without a limit on the line.
        """
        line = scale_line(LINES[line_name], self.flops)
        epochs, seconds = _count_epochs(unlimited)
        epoch_bytes = max(unlimited.bytes_sent) / max(1, epochs)
        epoch_seconds = max(seconds / max(1, epochs), epoch_bytes / line.up_bytes)
        kind = "computed"
        if epoch_seconds * (MIN_STEPS + 1) < self._extent.hivemind_seconds:
            cell = Cell("hivemind_optimizer", line, self._extent.hivemind_seconds)
            epochs, seconds = _count_epochs(self._run(cell))
            epoch_seconds, kind = seconds / max(1, epochs), "extrapolated"
        row = {
            "system": "hivemind_optimizer",
            "line": line_name,
            "step_seconds": round(epoch_seconds, 3),
            "seconds": steps and round(steps * epoch_seconds, 1),
            "kind": kind,
            "bytes_a_step": round(epoch_bytes),
            "epochs": epochs,
        }
        self.findings.loss.append(row)
        report("loss", row)

    def _measure_synchronous(
        self, system: str, line_name: str, steps: float | None, curve: CellResult
    ) -> None:
        """Time a few steps on a line and multiply them."""
        line = scale_line(LINES[line_name], self.flops)
        per_round = self._extent.round_steps if system == "torchft_diloco" else 1
        made = max(1, len(curve.step_seconds))
        step_bytes = max(curve.bytes_sent) / made
        computed = step_bytes / line.up_bytes + self.step_seconds_alone
        wanted = max(MIN_STEPS + 1, per_round * 2)
        kind = "extrapolated"
        if computed * wanted > self._extent.slow_seconds * 1.5:
            seconds, kind = computed, "computed"
        else:
            options = {"round_steps": per_round} if per_round > 1 else {}
            cell = Cell(system, line, self._extent.slow_seconds * 3, wanted, 0, options)
            result = self._run(cell)
            durations = result.step_seconds
            seconds = fmean(durations[-per_round * (len(durations) // per_round) :] or [computed])
            named = replace(line, name=line_name)
            compared = self._compare_with_model(system, named, seconds, self.step_time)
            if compared is not None:
                self.findings.model_errors.append(compared)
        row = {
            "system": system,
            "line": line_name,
            "step_seconds": round(seconds, 3),
            "seconds": steps and round(steps * seconds, 1),
            "kind": kind,
            "bytes_a_step": round(step_bytes),
            "utilisation": round(self.step_seconds_alone / seconds, 4),
        }
        self.findings.loss.append(row)
        report("loss", row)

    def _measure_asynchronous(self, system: str, line_name: str) -> None:
        """Train on a line until the target, or as long as the benchmark allows."""
        extent = self._extent
        limit = extent.home_seconds if line_name == "home" else extent.loss_seconds
        result = self._run(self._measure_ours(LINES[line_name], seconds=limit))
        self._compare_ours_with_model(line_name, result)
        scaled = scale_line(LINES[line_name], self.flops)
        sent_rate = max(figures.get("sent_rate", 0.0) for figures in result.figures)
        seconds = result.seconds_to_loss(self._extent.target_loss)
        kind = "measured"
        if seconds is None and len(result.losses) > 1:
            seconds, kind = _extrapolate(result, self._extent.target_loss), "extrapolated"
        row = {
            "system": system,
            "line": line_name,
            "seconds": seconds and round(seconds, 1),
            "kind": kind,
            "step_seconds": round(result.mean_step_seconds, 3),
            "last_loss": round(result.losses[-1][2], 3) if result.losses else None,
            "bytes": max(result.bytes_sent),
            # Of the line as scaled: what the system sends; that and what its transport adds.
            "sent_share": round(sent_rate / scaled.up_bytes, 3),
            "packet_share": round(max(result.bytes_sent) / limit / scaled.up_bytes, 3),
            "outcome": result.outcome,
            "epochs": result.figures[0].get("epochs"),
        }
        report("loss", row)
        self.findings.loss.append(row | {"losses": _thin_out(result.losses)})

    def _measure_ours(self, line: Line, steps: int = 0, seconds: float | None = None) -> Cell:
        """Return the cell of our worker on a line."""
        scaled = scale_line(line, self.flops)
        return Cell(
            "ours_updates",
            leave_room_for_packets(scaled),
            seconds or self._extent.loss_seconds,
            steps=steps,
            snapshot_steps=0 if steps else SNAPSHOT_STEPS,
            options=_limit_uplink(scaled),
        )

    # ---- 3 to 6 -------------------------------------------------------------------------------

    def measure_utilisation(self) -> None:
        """Measure the share of time in which our workers compute."""
        for name in ("50mbit", "home"):
            cell = self._measure_ours(LINES[name], seconds=self._extent.steady_seconds)
            result = self._run(replace(cell, snapshot_steps=0))
            shares = [figures.get("computing", 0.0) for figures in result.figures]
            self.findings.utilisation[name] = round(fmean(shares), 4)
            self._compare_ours_with_model(name, result)
        report("utilisation", self.findings.utilisation)

    def measure_unscaled(self) -> None:
        """Measure on a real line of 100 Mb/s, which flatters everyone on a slow processor."""
        line = LINES["100mbit"]
        steps = self._extent.calibration_steps
        cells = {
            "ours_updates": (steps, _limit_uplink(line)),
            "torch_ddp": (steps, {}),
            "decent_dp_adam": (steps, {}),
            # One of its steps has eight times as many sequences.
            "torch_pipeline": (self._extent.pipeline_steps, {"bits": 16, "schedule": "1f1b"}),
        }
        for system, (made, options) in cells.items():
            result = self._run(Cell(system, line, 120.0, made, 0, options))
            self.findings.unscaled[system] = round(result.tokens_per_second, 1)
        report("unscaled 100 Mb/s", self.findings.unscaled)

    def measure_churn(self) -> None:
        """Kill and restart workers in turn, and see what goes on."""
        between, seconds = self._extent.churn
        line = scale_line(LINES["1000mbit"], self.flops)
        for system in ("ours_updates", "torch_ddp", *EXTERNAL):
            options = {"round_steps": self._extent.round_steps}
            cell = Cell(system, line, seconds, 0, 2, options)
            if system == "ours_updates":
                cell = self._measure_ours(LINES["1000mbit"], seconds=seconds)
            result = self._run(replace(cell, churn=between))
            self.findings.churn[system] = {
                "outcome": result.outcome,
                "tokens_per_second": round(result.tokens_per_second, 1),
                "loss": round(result.losses[-1][2], 3) if result.losses else None,
            }
            report("churn", {"system": system} | self.findings.churn[system])

    def measure_unequal_speeds(self) -> None:
        """Measure machines of speeds 1:2:4:7 against the sum of their speeds."""
        seconds = self._extent.steady_seconds
        alone = self._run(with_rests(Cell("alone", None, seconds), SPEEDS))
        ours = self._run(with_rests(self._measure_ours(LINES["100mbit"], seconds=seconds), SPEEDS))
        share = ours.tokens_per_second / alone.tokens_per_second
        self.findings.unequal_of_sum = round(share, 3)
        self.findings.unequal_rates = {"alone": alone.rates, "ours": ours.rates}
        report("unequal", {"of_sum": self.findings.unequal_of_sum, "rates": ours.rates})

    def measure_equal_work(self) -> None:
        """Measure ours as decentralised Adam against decent-dp on the same batches, in turns."""
        pairs = [self._measure_equal_pair() for _ in range(self._extent.repeats)]
        # Their first step builds buckets and connects processes.
        times = [[sum(result.step_seconds[2:]) for result in pair] for pair in pairs]
        ratios = [round(ours / theirs, 3) for ours, theirs in times if theirs]
        ours, theirs = pairs[-1]
        self.findings.equal_work = {
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
        report("equal work", self.findings.equal_work)

    def _measure_equal_pair(self) -> tuple[CellResult, CellResult]:
        """Measure ours and decent-dp once, one right after the other."""
        steps = self._extent.equal_steps
        every = max(1, steps // 4)
        theirs = self._run(
            Cell("decent_dp_adam", None, 300.0, steps, every, {"from_first_step": True})
        )
        return self._run(Cell("ours_mixing", None, 300.0, steps, every)), theirs

    # ---- the runtime model --------------------------------------------------------------------

    def measure_runtime_model(self) -> None:
        """Measure steps where a line takes about as long as the arithmetic, and compare them.

        There neither of the two hides an error of the model. As on volunteers' machines, the model
        gets what was measured: the rate at which the system's own bytes travel on this line, and
        the arithmetic of the steps without their waits. What it predicts is the waits.
        """
        steps = self._extent.model_steps
        self._alone = self._run(Cell("alone", None, 300.0, steps=steps))
        payload = MODEL.parameters * 32 / BITS_PER_BYTE
        sent = {  # bytes of a step, and messages one after the other
            "torch_ddp": (2 * (WORKERS - 1) / WORKERS * payload, 2 * (WORKERS - 1)),
            "decent_dp_adam": (payload, 1),
            "ours_mixing": (payload, 1),
        }
        for share in self._extent.model_shares:
            megabits = payload / (share * self.step_seconds_alone) * BITS_PER_BYTE / MEGABIT
            line = Line(f"{share:g} steps a model", megabits, megabits, HOME_LINE.delay_seconds)
            for system, (sent_bytes, messages) in sent.items():
                row = self._measure_against_model(system, line, sent_bytes, messages)
                if row is None:
                    continue
                rows = [row]
                # Now and then a connection is slow for its first dozen steps on a line, and these
                # are all steps of a quick measurement.
                while rows[0]["error"] > MAX_MODEL_ERROR and len(rows) < self._extent.repeats:
                    again = self._measure_against_model(system, line, sent_bytes, messages)
                    rows.append(again or rows[0])  # too few steps say that it is as slow again
                rows.sort(key=lambda row: row["error"])
                median_row = rows[len(rows) // 2]
                errors = [row["error"] for row in rows]
                self.findings.model_errors.append(median_row | {"errors": errors})

    def _measure_against_model(
        self, system: str, line: Line, sent_bytes: float, messages: int
    ) -> dict[str, Any] | None:
        """Measure a system's steps on a line, and compare them; None if it makes too few."""
        steps = self._extent.model_steps
        options = _limit_uplink(line) if system == "ours_mixing" else {}
        idle = self._run(Cell(system, line, 120.0, steps, options=options | {"sequences": 1}))
        result = self._run(Cell(system, line, 120.0, steps, options=options))
        if len(idle.step_seconds) < MIN_STEPS or len(result.step_seconds) < MIN_STEPS:
            return None
        observed = observe_line(line, sent_bytes, messages, median(idle.step_seconds[1:]))
        seconds = result.computing_seconds
        measured_step = StepTime(fmean(seconds), stdev(seconds), STEP_TOKENS)
        return self._compare_with_model(
            system,
            replace(observed, name=line.name),
            fmean(result.step_seconds[1:]),
            self.step_time if system == "torch_ddp" else measured_step,
        )

    def _compare_ours_with_model(self, line_name: str, result: CellResult) -> None:
        """Compare the steps of our worker on a scaled line, if it made enough."""
        if len(result.step_seconds) < MIN_STEPS:
            return
        line = replace(scale_line(LINES[line_name], self.flops), name=line_name)
        measured = fmean(result.step_seconds[1:])
        row = self._compare_with_model("ours_updates", line, measured, self.step_time)
        if row is not None:
            self.findings.model_errors.append(row)

    def _compare_with_model(
        self, system: str, line: Line, measured: float, step: StepTime
    ) -> dict[str, Any] | None:
        """Return how far the runtime model's step is from the measured one; None: no model."""
        swarm = Swarm(WORKERS, MODEL.parameters, line, step)
        predictions: dict[str, Callable[[], Prediction]] = {
            "torch_ddp": lambda: predict_data_parallel(swarm),
            "decent_dp_adam": lambda: predict_decentralized_adam(swarm, EXPONENTIAL, 32),
            "ours_mixing": lambda: predict_decentralized_adam(swarm, EXPONENTIAL, 32),
            "ours_updates": lambda: predict_updates(swarm),
        }
        if system not in predictions:
            return None
        predicted = predictions[system]().step_seconds
        row = {
            "system": system,
            "line": line.name,
            "computing": round(step.mean_seconds, 3),
            "deviation": round(step.deviation_seconds, 3),
            "megabits": round(line.up_megabits, 2),
            "predicted": round(predicted, 3),
            "measured": round(measured, 3),
            "error": round(abs(predicted / measured - 1), 3),
        }
        report("runtime model", row)
        return row

    def _run(self, cell: Cell) -> CellResult:
        def prepare(out: Path) -> None:
            if cell.system == "ours_updates":
                ours_updates.prepare_machines(out, self._runner.folder / "text", WORKERS)

        result = self._runner.run(cell, prepare)
        if result.outcome.startswith(("fails", "does not start")):
            print(f"{cell.system}: {result.outcome}", file=sys.stderr, flush=True)
        return result


def _limit_uplink(line: Line) -> dict[str, float]:
    """Return the options with which our workers leave a part of the line to acknowledgements."""
    return {"uplink": UPLINK_SHARE * line.up_bytes}


def _thin_out(losses: list[tuple[float, int, float]]) -> list[tuple[float, float]]:
    """Return (seconds, loss) of a curve, at most one in CURVE_SECONDS, and the last one."""
    curve: list[tuple[float, float]] = []
    for n, (seconds, _, loss) in enumerate(losses):
        if not curve or n == len(losses) - 1 or seconds >= curve[-1][0] + CURVE_SECONDS:
            curve.append((round(seconds, 1), round(loss, 3)))
    return curve


def _sum_cpu_seconds(result: CellResult) -> float:
    """Return the CPU seconds of all workers' steps."""
    return round(sum(float(each.get("cpu_seconds", 0)) for each in result.figures), 2)


def _count_epochs(result: CellResult) -> tuple[int, float]:
    """Return how many epochs the first worker of hivemind has ended, and in how many seconds."""
    epochs = int(result.figures[0].get("epochs", 0)) if result.figures else 0
    steps = result.steps[0]
    return epochs, steps[-1][0] - steps[0][0]


def _extrapolate(result: CellResult, target: float) -> float | None:
    """Return when the last half of a curve would reach the target; None if it does not fall."""
    early, late = result.losses[len(result.losses) // 2], result.losses[-1]
    slope = (early[2] - late[2]) / max(late[0] - early[0], 1e-9)
    return late[0] + (late[2] - target) / slope if slope > 0 else None


def report(what: str, row: dict[str, Any]) -> None:
    """Print one measurement."""
    print(f"{what}: {json.dumps(row)}", flush=True)


def prepare_text(folder: Path) -> None:
    """Write the text that all systems train on, and what our worker needs of a run."""
    blobs = BlobStore(folder / "text")
    text = TextSpec(tokenizer="bytes", shard_tokens=1 << 20)
    manifest = shards.prepare_text(text, MODEL.vocabulary, RUN, blobs.store, list(read_stdlib()))
    signed = MIRROR.sign("manifest", manifest)
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    (folder / "signed_manifest.json").write_text(signed.model_dump_json())
    (folder / "spec.json").write_text(ours_updates.build_spec(signed, "auto").to_json())


def run_benchmark(
    extent: Extent,
    only: list[str],
    save: Callable[[Findings], None] = lambda findings: None,
    delay_seconds: float = HOME_LINE.delay_seconds,
) -> Findings:
    """Measure everything, or what is named.

    Args:
        extent: how much is measured.
        only: names of the parts; empty: all.
        save: called with the findings after each part.
        delay_seconds: one way between two workers. The runtime model is told the home line's.

    Raises:
        NamespaceError: There are no network namespaces for this process.
        InstallError: An external system cannot be installed.
        LinkError: The machine is too busy to be measured.
    """
    folder = BUILD / f"run.{os.getpid()}"
    with ExitStack() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        network = FieldNetwork(WORKERS, delay_seconds, cleanup)
        ChildProcesses(BUILD, cleanup)  # ends every process, also after Ctrl-C
        network.create()
        python = install_systems(BUILD / "venv")
        folder.mkdir(parents=True)
        prepare_text(folder)
        runner = FieldRunner(folder, network, dict.fromkeys(EXTERNAL, python), cleanup)
        benchmark = ExchangeBenchmark(runner, extent)
        benchmark.calibrate()
        parts: dict[str, Callable[[], None]] = {
            "pipelines": benchmark.measure_pipelines,
            "loss": benchmark.measure_loss,
            "equal": benchmark.measure_equal_work,
            "model": benchmark.measure_runtime_model,
            "utilisation": benchmark.measure_utilisation,
            "unequal": benchmark.measure_unequal_speeds,
            "churn": benchmark.measure_churn,
            "unscaled": benchmark.measure_unscaled,
        }
        assert tuple(parts) == PARTS
        seconds = benchmark.findings.machine.setdefault("seconds", {})
        for name, measure in parts.items():
            if not only or name in only:
                started = time.monotonic()
                measure()
                seconds[name] = round(time.monotonic() - started, 1)
                save(benchmark.findings)
    return benchmark.findings


def main() -> None:
    """Parse the command line, measure, and print the last line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a small version of all")
    parser.add_argument(
        "--only", action="append", default=[], choices=PARTS, help="one part, several times"
    )
    parser.add_argument("--line", action="append", choices=LINES, help="for time to a loss")
    parser.add_argument(
        "--ours", action="store_true", help="time to a loss of our worker only, without the others"
    )
    parser.add_argument(
        "--without-delay",
        action="store_true",
        help="lines that delay nothing; for --only pipelines",
    )
    parser.add_argument("--output", type=Path, default=BUILD / "findings.json")
    parser.add_argument("--docs", action="store_true", help="write the plots of the document")
    arguments = parser.parse_args()
    if arguments.ours and arguments.only != ["loss"]:
        parser.error("--ours needs --only loss: all other parts measure what they compare with")
    if arguments.without_delay and arguments.only != ["pipelines"]:
        parser.error("--without-delay needs --only pipelines: all other parts assume the delay")
    delay_seconds = 0.0 if arguments.without_delay else HOME_LINE.delay_seconds
    torch.set_num_threads(1)
    extent = QUICK if arguments.quick else FULL
    if arguments.line:
        extent = replace(extent, loss_lines=tuple(arguments.line))
    extent = replace(extent, only_ours=arguments.ours)
    started = time.monotonic()

    def save(findings: Findings) -> None:
        findings.machine["minutes"] = round((time.monotonic() - started) / 60, 1)
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(asdict(findings), indent=1))

    try:
        findings = run_benchmark(extent, arguments.only, save, delay_seconds)
    except (NamespaceError, InstallError, LinkError) as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    if arguments.docs:
        draw_plots(findings, extent.target_loss)
    print(json.dumps(summarise(findings)))


if __name__ == "__main__":
    main()
