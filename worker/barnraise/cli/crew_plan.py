"""Print how machines would train a model as one crew, for `barnraise plan --crew`."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.markup import escape

from barnraise.cli.console import new_table, out, print_json
from barnraise.formats import format_bytes, format_parameters, format_seconds
from barnraise.planning.crew import CrewMachine, CrewPlan, CrewTask, plan_crew
from barnraise.planning.crew_pricing import describe_machine
from barnraise.planning.hardware import Hardware
from barnraise.planning.lines import Line
from barnraise.planning.write_advice import PlanRequest


def plan_assumed_crew(
    request: PlanRequest,
    machines: Sequence[tuple[str, Hardware]],
    line: Line,
    boundary_bits: int | None,
) -> CrewPlan:
    """Plan a crew of assumed machines.

    Args:
        request: what they train; the limits on sizes are those of this machine, and do not count.
        machines: name and description of each, the lead's first.
        line: of each machine.
        boundary_bits: None to choose by the line.

    Raises:
        PlanError: They cannot train the model together.
    """
    task = CrewTask(request.model, request.step_sequences, boundary_bits)
    limits = replace(request.limits, memory=None, device_memory=None)
    described: dict[Hardware, CrewMachine] = {}  # machines alike are priced once
    for name, hardware in machines:
        if hardware not in described:
            alike = replace(request, hardware=hardware, limits=limits)
            described[hardware] = describe_machine(name, line, alike)
    return plan_crew([replace(described[hardware], name=name) for name, hardware in machines], task)


def print_crew_plan(model: str, crew: CrewPlan, note: str, as_json: bool) -> None:
    """Print a crew's deal, what limits it, and whether to form it."""
    deal = crew.deal
    if as_json:
        print_json(describe_crew(crew) | {"model": model, "assumed": note})
        return
    size = format_parameters(crew.task.model.parameters)
    out.print(f"[bold]{escape(model)}[/], {size}, on a crew of {len(deal.stages)}", "", sep="\n")
    table = new_table("machine", "blocks", "own work", "line", "memory", "GPU", "alone")
    for column in table.columns[1:]:
        column.justify = "right"
        column.no_wrap = True
    stages = {stage.machine: stage for stage in deal.stages}
    for index, (machine, alone) in enumerate(zip(crew.machines, crew.alone, strict=True)):
        speed = f"{alone:,.1f} tokens/s" if alone else "too large"
        stage = stages.get(index)
        if stage is None:
            table.add_row(escape(machine.name), "left out", *[""] * 4, speed)
            continue
        ends = "ends, " if index == 0 else ""
        last = stage.first_block + stage.blocks - 1
        table.add_row(
            escape(machine.name),
            f"{ends}{stage.first_block}\u2013{last}",
            format_seconds(stage.price.step_seconds),
            format_seconds(stage.link_seconds * deal.micro_batches),
            format_bytes(stage.price.host_bytes),
            format_bytes(stage.price.device_bytes),
            speed,
        )
    out.print(table, "", sep="\n")
    out.print(
        f"{deal.micro_batches} micro-batches of {deal.sequences}, boundaries in "
        f"{deal.boundary_bits} bits: {format_seconds(deal.step_seconds)} a step, "
        f"{crew.tokens_per_second:,.0f} tokens/s.",
        crew.reason,
        sep="\n",
    )
    out.print(f"\n[yellow]{escape(note)}[/]")


def describe_crew(crew: CrewPlan) -> dict[str, Any]:
    """Return a crew's plan as `--json` prints it."""
    deal = crew.deal
    limiting, what = deal.bottleneck
    return {
        "tokens_per_second": crew.tokens_per_second,
        "step_seconds": deal.step_seconds,
        "sequences": deal.sequences,
        "micro_batches": deal.micro_batches,
        "boundary_bits": deal.boundary_bits,
        "bottleneck": {"machine": crew.machines[limiting.machine].name, "what": what},
        "pays": crew.pays,
        "sentence": crew.reason,
        "stages": [
            {
                "machine": crew.machines[stage.machine].name,
                "has_ends": stage.machine == 0,
                "first_block": stage.first_block,
                "blocks": stage.blocks,
                "own_seconds": stage.price.step_seconds,
                "line_seconds": stage.link_seconds * deal.micro_batches,
                "host_bytes": stage.price.host_bytes,
                "device_bytes": stage.price.device_bytes,
                "disk_bytes": stage.price.disk_bytes,
            }
            for stage in deal.stages
        ],
        "left_out": [crew.machines[index].name for index in crew.left_out],
        "alone_tokens_per_second": {
            machine.name: speed for machine, speed in zip(crew.machines, crew.alone, strict=True)
        },
    }
