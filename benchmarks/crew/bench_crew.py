"""Measure crews whose machines are processes with a thread each; the last line is one JSON object.

    make bench-crew            QUICK=1 makes it shorter, and leaves out the losses
    … bench_crew.py --only kills widths

Speeds that are compared are measured in turns. As root on Linux, the crew with a slow line runs in
network namespaces. What is not measured is listed under "missing".
"""

import argparse
import json
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from churn import run_churn
from crew_losses import compare_holders, compare_losses
from crew_process import Machine
from field_network import FieldNetwork, NamespaceError
from helpers.worker.crew_churn import simulate
from helpers.worker.crews import deal
from helpers.worker.plans import bitwise

from barnraise.errors import PlanError
from barnraise.planning.crew import (
    CrewTask,
    Deal,
    PipelineShape,
    plan_crew,
)
from barnraise.planning.crew_balance import lay_deal, slow_down
from barnraise.planning.crew_pricing import describe_machine
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.lines import Line
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan, make_stage_plan
from barnraise.planning.write_advice import PlanRequest
from barnraise.spec import ModelSpec
from barnraise.swap.hardware_probe import probe
from barnraise.training.crew.roster import CrewRoster

LIMITS = Limits(clipping="exact", precision="float32")
LAN_LINE = Line("loopback", 10_000, 10_000, 0.0002)
SLOW_LINE = Line("4 Mb/s", 4, 4, 0.0)
EXACT_STEPS = 20
PART_OF_NEED = 0.45  # of one machine's memory
NEAR_PLAN = 1.001  # times a plan's bytes: what is counted includes the texts of the steps
FITS_RATE = 0.1  # of the learning rate of the tiny models
FITS_MODEL = ModelSpec(layers=8, width=512, heads=8, context=64, vocabulary=2048)
SPEED_MODEL = ModelSpec(layers=12, width=512, heads=8, context=128, vocabulary=1024)
LINE_MODEL = ModelSpec(layers=4, width=256, heads=8, context=64, vocabulary=512)
MICRO_BATCHES = 16
SQUARE_LINE = Line("50 Mb/s", 50, 50, 0.0)
SQUARE_MICRO_BATCHES = 4
SQUARE_SEQUENCES = 4  # of a micro-batch, whose boundaries are far longer than the line's bursts
SHARED_MODEL = ModelSpec(layers=5, width=512, heads=8, context=64, vocabulary=256)
LOSS_SEEDS, LOSS_STEPS = 3, 1000
SHARED_STEPS = 400  # of the loss with two holders
SLOWED = 3  # times the seconds of the slowed machine
KILLS = 8, 480.0  # in so many seconds
QUICK_KILLS = 2, 30.0


@dataclass(frozen=True)
class CrewCase:
    """A crew, and how one of its steps is divided.

    Attributes:
        model: what it trains.
        counts: blocks of each span, the lead's first.
        sequences: of a micro-batch.
        micro_batches: of a step.
        bits: of a boundary.
        limits: of each machine.
        holders: machines of each span; without any, each has one.
    """

    model: ModelSpec
    counts: tuple[int, ...]
    sequences: int = 1
    micro_batches: int = MICRO_BATCHES
    bits: int = 32
    limits: Limits = LIMITS
    holders: tuple[int, ...] = ()

    def roster(self) -> CrewRoster:
        """Return the crew's roster."""
        plan = bitwise.resident_plan(self.model)
        plan = replace(plan, sequences=self.sequences, micro_batches=self.micro_batches)
        return deal(plan, self.counts, self.bits, self.holders)

    def plans(self, hardware: Hardware) -> list[Plan]:
        """Return the planner's plan of each machine's stage."""
        step_sequences = self.sequences * self.micro_batches
        return [
            make_stage_plan(hardware, self.model, stage, self.limits, step_sequences)
            for stage in self.roster().stages
        ]


def case_of(model: ModelSpec, dealt: Deal, limits: Limits = LIMITS) -> CrewCase:
    """Return the crew that the planner has dealt."""
    counts = tuple(stage.blocks for stage in dealt.stages)
    return CrewCase(model, counts, dealt.sequences, dealt.micro_batches, 32, limits)


class Crew:
    """A crew of processes on this machine."""

    def __init__(
        self,
        case: CrewCase,
        hardware: Hardware,
        cleanup: ExitStack,
        cores: Sequence[int] | None = None,
        network: FieldNetwork | None = None,
        counts: bool = False,
    ) -> None:
        """Start it, on a core a machine, or in a network's namespaces, if these are given.

        Where `counts` is given, all allocations are counted.
        """
        self.plans = case.plans(hardware)
        roster, numbers = case.roster(), range(len(self.plans))
        prefixes = [network.command_prefix(n) if network else [] for n in numbers]
        hosts = [network.host(n) if network else "127.0.0.1" for n in numbers]
        self.machines = [
            cleanup.enter_context(Machine(cores[n] if cores else None, prefixes[n]))
            for n in numbers
        ]
        for machine in self.machines if counts else ():
            machine.request("count_allocations")
        addresses = {
            n: self.machines[n].request("listen", number=n, host=hosts[n]) for n in numbers
        }
        for n in numbers[1:]:
            self.machines[n].send(
                "serve", plan=self.plans[n], roster=roster, number=n, addresses=addresses
            )
        self.lead = self.machines[0]
        self.lead.request("lead", plan=self.plans[0], roster=roster, addresses=addresses)

    def close(self) -> list[tuple[int, int]]:
        """End it; return the bytes that each machine has counted, and by which it has grown."""
        own = self.lead.request("close")
        return [own, *(machine.receive() for machine in self.machines[1:])]


def open_alone(plan: Plan, cleanup: ExitStack, core: int | None = None) -> Machine:
    """Start a machine that trains the whole model alone."""
    machine = cleanup.enter_context(Machine(core))
    machine.request("open_alone", plan=plan)
    return machine


# ---- parts ---------------------------------------------------------------------------------------


def train_two_rounds(machine: Machine) -> list[Any]:
    """Return losses, norms, payloads, a validation and the anchor after two rounds."""
    found: list[Any] = []
    for first in (0, EXACT_STEPS // 2):
        trained = machine.request("train", steps=EXACT_STEPS // 2, first=first)
        found += [trained["losses"], trained["norms"], machine.request("end_round")]
    return [*found, machine.request("evaluate", sequences=3), machine.request("read_anchor")]


def find_exact(hardware: Hardware, crews: Sequence[tuple[int, ...]]) -> bool:
    """Return whether crews with so many blocks a machine have the bits of one machine."""
    model, micro_batches = bitwise.MODEL, 4
    with ExitStack() as cleanup:
        alone = open_alone(bitwise.resident_plan(model, micro_batches), cleanup)
        expected = train_two_rounds(alone)
    is_exact = True
    sequences = bitwise.SEQUENCES // micro_batches
    for counts in crews:
        with ExitStack() as cleanup:
            crew = Crew(CrewCase(model, counts, sequences, micro_batches), hardware, cleanup)
            is_same = train_two_rounds(crew.lead) == expected
            crew.close()
        print(f"  {len(counts)} machines: {'same bits' if is_same else 'DIFFERENT'}", flush=True)
        is_exact = is_exact and is_same
    return is_exact


def find_fits(hardware: Hardware, steps: int) -> tuple[bool, float]:
    """Return whether three machines train what none can alone, and how far they exceed their plans.

    What engines and torch allocate is counted in one crew, and must not exceed the plans. How many
    MB more than their plans processes grow by, is measured in another one.
    """
    no_disk, sequences = replace(hardware, disk=0), 16
    need = make_plan(no_disk, FITS_MODEL, LIMITS, sequences).host_bytes
    limits = replace(LIMITS, memory=int(PART_OF_NEED * need))
    request = PlanRequest(no_disk, FITS_MODEL, limits, sequences)
    try:
        request.make_plan()
        return False, 0.0
    except PlanError as error:
        print(f"  alone: {error}", flush=True)
    machines = [describe_machine(f"machine {n}", LAN_LINE, request) for n in range(3)]
    dealt = plan_crew(machines, CrewTask(FITS_MODEL, sequences, 32)).deal
    case = case_of(FITS_MODEL, dealt, limits)
    used: list[list[int]] = []
    losses: list[float] = []
    for counts in (True, False):
        with ExitStack() as cleanup:
            crew = Crew(case, no_disk, cleanup, counts=counts)
            trained = crew.lead.request("train", steps=2 if counts else steps, rate=FITS_RATE)
            used.append([both[0 if counts else 1] for both in crew.close()])
            losses = trained["losses"]
    planned = [plan.host_bytes for plan in case.plans(no_disk)]
    counted, grown = used
    print(
        f"  one machine needs {need / 1e6:.0f} MB, each has {PART_OF_NEED * need / 1e6:.0f} MB; "
        f"blocks {case.counts}; in MB: planned {_megabytes(planned)}, counted "
        f"{_megabytes(counted)}, processes grew by {_megabytes(grown)}; loss {losses[0]:.2f} to "
        f"{losses[-1]:.2f}",
        flush=True,
    )
    is_within = all(c <= NEAR_PLAN * p for c, p in zip(counted, planned, strict=True))
    over = max(size - plan for size, plan in zip(grown, planned, strict=True))
    return losses[-1] < losses[0] and is_within, over / 1e6


def _megabytes(sizes: Sequence[int]) -> list[float]:
    return [round(size / 1e6, 1) for size in sizes]


def measure_speeds(hardware: Hardware, rounds: int) -> tuple[float, float]:
    """Return a crew's speed over the sum of its machines' alone, and its planner's relative error.

    A round is a step of two machines alone at the same time, a core each, and one of the crew.
    """
    request = PlanRequest(hardware, SPEED_MODEL, LIMITS, MICRO_BATCHES)
    machines = [describe_machine(f"core {n}", LAN_LINE, request) for n in range(2)]
    dealt = plan_crew(machines, CrewTask(SPEED_MODEL, MICRO_BATCHES, 32)).deal
    tokens = MICRO_BATCHES * SPEED_MODEL.context
    ratios: list[float] = []
    seconds: list[float] = []
    with ExitStack() as cleanup:
        crew = Crew(case_of(SPEED_MODEL, dealt), hardware, cleanup, cores=(0, 1))
        alone = [open_alone(request.make_plan(), cleanup, core) for core in (0, 1)]
        for number in range(rounds + 1):
            for machine in alone:
                machine.send("train", steps=1, first=number)
            apart = sum(tokens / machine.receive()["seconds"][0] for machine in alone)
            step_seconds = crew.lead.request("train", steps=1, first=number)["seconds"][0]
            if number > 0:  # the first step of each is slower
                ratios.append(tokens / step_seconds / apart)
                seconds.append(step_seconds)
        crew.close()
    predicted, measured = dealt.step_seconds, median(seconds)
    print(
        f"  blocks {list(dealt.counts.values())}, {dealt.micro_batches} micro-batches: "
        f"{measured:.2f} s a step, predicted {predicted:.2f} s; of the sum of both speeds "
        f"{[round(ratio, 2) for ratio in ratios]}",
        flush=True,
    )
    return median(ratios), abs(predicted - measured) / measured


def measure_eight_bit_gain(hardware: Hardware, rounds: int) -> float:
    """Return the speed with boundaries in 8 bits over that in 32, over lines of 4 Mb/s.

    Raises:
        NamespaceError: this process may not shape lines.
    """
    ratios: list[float] = []
    with ExitStack() as cleanup:
        network = FieldNetwork(2, None, cleanup)
        network.create()
        crews = [
            Crew(CrewCase(LINE_MODEL, (2, 2), bits=bits), hardware, cleanup, network=network)
            for bits in (32, 8)
        ]
        network.shape(SLOW_LINE)
        for number in range(rounds + 1):
            exact, short = (
                crew.lead.request("train", steps=1, first=number)["seconds"][0] for crew in crews
            )
            if number > 0:
                ratios.append(exact / short)
                print(f"  {exact:.2f} s in 32 bits, {short:.2f} s in 8", flush=True)
        network.shape(None)
        for crew in crews:
            crew.close()
    return median(ratios)


def measure_square_cube(hardware: Hardware, rounds: int, widths: Sequence[int]) -> float:
    """Return the largest relative error of the predicted boundary share, over models' widths.

    The boundary share is the part of a step that a line without limits saves. Compute grows with
    the square of the width, and boundaries with the width. `plan_error` judges the predicted
    compute: here it is scaled to what a step takes without the line.

    Raises:
        NamespaceError: this process may not shape lines.
    """
    worst = 0.0
    for width in widths:
        model = ModelSpec(layers=2, width=width, heads=width // 64, context=64, vocabulary=256)
        case = CrewCase(model, (1, 1), SQUARE_SEQUENCES, SQUARE_MICRO_BATCHES)
        steps: list[list[float]] = []
        with ExitStack() as cleanup:
            network = FieldNetwork(2, None, cleanup)
            network.create()
            crew = Crew(case, hardware, cleanup, cores=(0, 1), network=network)
            for number in range(rounds + 1):
                seconds: list[float] = []
                for line in (None, SQUARE_LINE):
                    network.shape(line)
                    trained = crew.lead.request("train", steps=2, first=2 * number)
                    seconds.append(trained["seconds"][1])
                if number > 0:
                    steps.append(seconds)
            network.shape(None)
            crew.close()
        fast, slow = (median(column) for column in zip(*steps, strict=True))
        ratio = fast / _predict_step(hardware, case, LAN_LINE)
        measured = 1 - fast / slow
        predicted = 1 - fast / _predict_step(hardware, case, SQUARE_LINE, ratio)
        print(
            f"  width {width}: {fast:.2f} and {slow:.2f} s a step, share {measured:.3f}, "
            f"predicted {predicted:.3f}",
            flush=True,
        )
        worst = max(worst, abs(predicted - measured) / measured)
    return worst


def _predict_step(hardware: Hardware, case: CrewCase, line: Line, ratio: float = 1.0) -> float:
    """Return the planner's seconds of a step whose machines have lines like this one.

    `ratio`: measured over predicted seconds of their computation.
    """
    sequences = case.sequences * case.micro_batches
    request = PlanRequest(hardware, case.model, case.limits, sequences)
    machine = slow_down(describe_machine("machine", line, request), ratio)
    shape = PipelineShape(case.model, case.sequences, case.micro_batches, case.bits)
    dealt = lay_deal([machine] * len(case.counts), shape, case.counts)
    assert dealt is not None
    return dealt.step_seconds


def measure_vs_torch(hardware: Hardware, rounds: int, factor: int = 1) -> float:
    """Return a crew's speed over that of torch's GPipe with equal spans, without recomputation.

    In both, one machine takes `factor` times as long: torch's is the one without the head.
    """
    request = PlanRequest(hardware, SPEED_MODEL, LIMITS, MICRO_BATCHES)
    first = describe_machine("lead", LAN_LINE, request)

    machines = [first, slow_down(first, factor)]
    dealt = plan_crew(machines, CrewTask(SPEED_MODEL, MICRO_BATCHES, 32)).deal
    shape = dealt.sequences, dealt.micro_batches
    ratios: list[float] = []
    with ExitStack() as cleanup:
        crew = Crew(case_of(SPEED_MODEL, dealt), hardware, cleanup, cores=(0, 1))
        assert all(plan.retained_blocks == len(plan.blocks) for plan in crew.plans)
        ranks = [cleanup.enter_context(Machine(core)) for core in (0, 1)]
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
        blocks = SPEED_MODEL.layers // 2
        for n, rank in enumerate(ranks):
            rank.send(
                "open_gpipe", model=SPEED_MODEL, blocks=blocks, rank=n, shape=shape, port=port
            )
        for rank in ranks:
            rank.receive()
        if factor > 1:
            cleanup.enter_context(crew.machines[1].slowed(factor))
            cleanup.enter_context(ranks[0].slowed(factor))
        for number in range(rounds + 1):
            for rank in ranks:
                rank.send("train_gpipe", steps=2)
            theirs = max(sum(rank.receive()) for rank in ranks)
            ours = sum(crew.lead.request("train", steps=2, first=2 * number)["seconds"])
            if number > 0:
                ratios.append(theirs / ours)
        crew.close()
    print(
        f"  blocks {list(dealt.counts.values())}, {dealt.micro_batches} micro-batches of "
        f"{dealt.sequences}: {[round(ratio, 2) for ratio in ratios]} of torch's speed",
        flush=True,
    )
    return median(ratios)


def measure_share_error(hardware: Hardware, rounds: int) -> float:
    """Return by how much the share of a threefold slower holder differs from that of its speed.

    A round is a step with each of the two alone, which shows their speeds, and one with both.
    """
    case = CrewCase(SHARED_MODEL, (1, SHARED_MODEL.layers - 1), holders=(1, 2))
    alone: dict[int, list[float]] = {1: [], 2: []}
    dealt = [0, 0]
    with ExitStack() as cleanup:
        crew = Crew(case, hardware, cleanup, cores=(1, 0, 1))  # the lead has little to do
        cleanup.enter_context(crew.machines[2].slowed(SLOWED))
        for number in range(rounds + 1):
            seconds = {n: crew.lead.request("train_without", number=3 - n) for n in alone}
            counts = crew.lead.request("count_dealt")
            if number > 0:  # the first steps are slower
                dealt = [old + new for old, new in zip(dealt, counts, strict=True)]
                for n, found in alone.items():
                    found.append(seconds[n])
        crew.close()
    fast, slow = (median(found) for found in alone.values())
    expected, share = fast / (fast + slow), dealt[1] / sum(dealt)
    print(
        f"  alone {fast:.2f} and {slow:.2f} s: of the micro-batches {expected:.3f} would be the "
        f"slow one's; it had {share:.3f} of them",
        flush=True,
    )
    return abs(share - expected)


# ---- the whole --------------------------------------------------------------------------------


def run_bits(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Compare crews with one machine, bit by bit."""
    counts = ((1, 2, 2, 3),) if quick else ((4, 4), (2, 3, 3), (1, 2, 2, 3))
    return {"exact": find_exact(hardware, counts)}


def run_memory(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Train what no machine can hold alone."""
    fits, excess = find_fits(hardware, 5 if quick else 30)
    return {"fits": fits, "process_over_plan_mb": round(excess)}


def run_speed(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Compare a crew with its machines alone, and with its planner."""
    efficiency, plan_error = measure_speeds(hardware, 5 if quick else 25)
    return {"efficiency": round(efficiency, 3), "plan_error": round(plan_error, 3)}


def run_torch(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Compare a crew with torch's pipeline, also where one machine is slowed."""
    rounds = 1 if quick else 12
    cases = {"vs_torch_pipeline": 1, "vs_torch_slowed": SLOWED}
    return {
        name: round(measure_vs_torch(hardware, rounds, factor), 3) for name, factor in cases.items()
    }


def run_holders(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Deal micro-batches to two unequal holders of a span."""
    return {"share_error": round(measure_share_error(hardware, 2 if quick else 9), 3)}


def run_eight_bits(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Compare boundaries in 8 bits with those in 32, over slow lines."""
    return {"eight_bit_gain": round(measure_eight_bit_gain(hardware, 3 if quick else 15), 2)}


def run_widths(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Compare the boundary share of models of several widths with what is predicted."""
    widths = (256, 1024) if quick else (256, 512, 1024, 2048)
    return {"square_cube": round(measure_square_cube(hardware, 2 if quick else 9, widths), 3)}


def run_losses(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Train with boundaries in 8 bits, and with two holders of a span."""
    return {
        "eight_bit_loss": round(compare_losses(LOSS_SEEDS, LOSS_STEPS), 4),
        "shared_loss": round(compare_holders(LOSS_SEEDS, SHARED_STEPS), 4),
    }


def run_kills(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Kill machines of a crew, and start them again."""
    churn = run_churn(*(QUICK_KILLS if quick else KILLS))
    return {
        "lost_updates": churn.lost_updates,
        "anchors_equal": churn.anchors_equal,
        "lost_rounds": round(churn.lost_rounds, 1),
        "return_s": round(churn.median_return, 1),
    }


def run_rebalancing(hardware: Hardware, quick: bool) -> dict[str, Any]:
    """Simulate machines whose speeds change."""
    seeds, rounds = range(3), 300
    return {
        name: round(sum(simulate(seed, balances, rounds) for seed in seeds) / len(seeds), 3)
        for name, balances in (("oracle", True), ("oracle_without", False))
    }


PARTS: dict[str, Callable[[Hardware, bool], dict[str, Any]]] = {
    "bits": run_bits,
    "memory": run_memory,
    "speed": run_speed,
    "torch": run_torch,
    "holders": run_holders,
    "eight-bits": run_eight_bits,
    "widths": run_widths,
    "losses": run_losses,
    "kills": run_kills,
    "rebalancing": run_rebalancing,
}
NOT_QUICK = ("losses",)


def main() -> None:
    """Run the parts and print their seconds, then the results; a part that fails is missing."""
    parser = argparse.ArgumentParser(description="Measure crews of processes.")
    parser.add_argument("--quick", action="store_true", help="fewer turns, and no losses")
    parser.add_argument("--only", nargs="+", choices=PARTS, help="some of the parts")
    options = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        hardware = replace(probe(Path(folder), "cpu"), cores=1)
    results: dict[str, Any] = {}
    missing: list[str] = []
    has_failed = False
    for name in options.only or PARTS:
        if options.quick and name in NOT_QUICK:
            missing.append(name)
            continue
        print(f"{name} …", flush=True)
        part_started = time.perf_counter()
        try:
            results |= PARTS[name](hardware, options.quick)
        except NamespaceError as error:
            print(f"  {error}", flush=True)
            missing.append(name)
        except Exception:
            traceback.print_exc()
            missing.append(name)
            has_failed = True
        print(f"  {time.perf_counter() - part_started:.0f} s", flush=True)
    results |= {"missing": missing, "seconds": round(time.perf_counter() - started)}
    print(json.dumps(results))
    sys.exit(has_failed)


if __name__ == "__main__":
    main()
