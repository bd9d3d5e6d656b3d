"""Run `barnraise plan`: show how a model would train on this machine or on an assumed one."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.markup import escape

from barnraise.cli.console import out, print_json
from barnraise.cli.machine_options import (
    JsonOption,
    MachineOptions,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import expand_option_groups
from barnraise.cli.resource_options import ResourceOptions
from barnraise.formats import format_parameters, parse_bytes
from barnraise.planning import render
from barnraise.planning.budgets import CONTEXT_BYTES, extend_to_limits
from barnraise.planning.hardware import Hardware, UpdateRate
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import preset

GPU_PANEL = "A GPU that is not here (with --device cuda)"
ASSUMED_GPU_MEMORY = 24 * 10**9
# AdamW's parameters per second on an assumed GPU, by dtype and bits of the moments.
ASSUMED_UPDATE_RATES = (
    ("float32", 32, 2e10),
    ("bfloat16", 32, 8e9),
    ("float32", 8, 5e9),
    ("bfloat16", 8, 4e9),
)


@dataclass(frozen=True)
class AssumedGpuOptions:
    """The speed of a GPU that this machine does not have."""

    gpu_tflops: Annotated[
        float,
        typer.Option(
            min=0.1, help="Its sustained bf16 speed in TFLOP/s.", rich_help_panel=GPU_PANEL
        ),
    ] = 60.0
    gpu_link: Annotated[
        str, typer.Option(help="Bytes a second between it and memory.", rich_help_panel=GPU_PANEL)
    ] = "20GB"


@expand_option_groups
def plan(
    model: Annotated[str, typer.Option(help="A preset, like gpt2-1.5b.")],
    machine: MachineOptions,
    resources: ResourceOptions,
    sequences: Annotated[int, typer.Option(min=1, max=65536, help="Sequences of one step.")] = 8,
    *,
    gpu: AssumedGpuOptions,
    as_json: JsonOption = False,
) -> None:
    """Show how a model would train here, or with the limits given.

    Dry run: it shows where the state lies, what overlaps and the time of a step.
    """
    shape = preset(model)
    state_dir = open_state_dir(machine.home)
    limits = resources.apply_to(state_dir.limits)
    is_for_gpu = machine.device.lower().startswith("cuda")
    # A GPU may be planned for that is not here: measure what is.
    device = "" if is_for_gpu else machine.device
    hardware = measure_machine(state_dir, machine.hardware, device, machine.threads)
    note = ""
    if is_for_gpu and hardware.device == "cpu":
        hardware = assume_gpu(hardware, gpu, limits.device_memory or ASSUMED_GPU_MEMORY)
        note = (
            f"No GPU was measured here: {gpu.gpu_tflops:g} TFLOP/s and {gpu.gpu_link}/s to it "
            "are assumed."
        )
    elif is_for_gpu:
        hardware = measure_machine(state_dir, machine.hardware, machine.device, machine.threads)
    elif limits.device_memory and hardware.device == "cpu":
        note = (
            "No GPU here: the layers being computed are kept in this much of the RAM. "
            "--device cuda assumes a GPU."
        )
    training_plan = make_plan(extend_to_limits(hardware, limits), shape, limits, sequences)
    if as_json:
        print_json(_plan_fields(training_plan, note))
        return
    heading = f"[bold]{model}[/] on {escape(hardware.name)}, {format_parameters(shape.parameters)}"
    out.print(heading, "", sep="\n")
    out.print(
        render.build_figures_table(training_plan),
        "",
        render.build_state_table(training_plan),
        "",
        sep="\n",
    )
    timeline = render.draw_timeline(training_plan, hardware, out.width)
    out.print(*timeline, sep="\n", no_wrap=True, crop=True)
    if note:
        out.print(f"\n[yellow]{note}[/]")


def assume_gpu(host: Hardware, gpu: AssumedGpuOptions, memory: int) -> Hardware:
    """Return the host with an assumed GPU, whose other rates are those of typical GPUs.

    Args:
        host: the measured machine.
        gpu: the GPU's speed.
        memory: bytes of the GPU's memory that are free.
    """
    flops = gpu.gpu_tflops * 1e12
    link = parse_bytes(gpu.gpu_link)
    updates = tuple(UpdateRate("device", *form) for form in ASSUMED_UPDATE_RATES)
    return dataclasses.replace(
        host,
        device="cuda",
        name="an assumed GPU",
        device_memory=memory + CONTEXT_BYTES,
        device_memory_free=memory,
        dtype="bfloat16",
        matmul=((1024, flops),),
        attention=0.5 * flops,
        elementwise=700e9,
        to_device=link,
        from_device=link,
        products=(),
        attention_contexts=(),
        attention_heads=(),
        attention_backward=0.4 * flops,
        logits=(),
        updates=(*host.updates, *updates),
    )


def _plan_fields(training_plan: Plan, note: str) -> dict[str, object]:
    """Return the plan with the derived figures that `--json` prints."""
    tokens = render.count_tokens(training_plan)
    return dataclasses.asdict(training_plan) | {
        "tokens": tokens,
        "tokens_per_second": tokens / training_plan.step_seconds,
        "state_bytes": render.sum_state_bytes(training_plan),
        "sentence": render.describe_plan(training_plan),
        "assumed": note,
    }
