"""Run `barnraise plan`: show how a model would train on this machine or on an assumed one."""

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Literal

import typer
from rich.markup import escape

from barnraise.cli.console import new_table, out, print_json
from barnraise.cli.crew_plan import plan_assumed_crew, print_crew_plan
from barnraise.cli.machine_options import (
    JsonOption,
    MachineOptions,
    measure_machine,
    open_state_dir,
)
from barnraise.cli.option_groups import option
from barnraise.cli.resource_options import ResourceOptions
from barnraise.errors import StateError
from barnraise.formats import format_bytes, format_parameters, format_share, parse_bytes
from barnraise.planning import render
from barnraise.planning.budgets import CONTEXT_BYTES, extend_to_limits
from barnraise.planning.hardware import FP32_SHARE, Hardware, MatmulRates, UpdateRate
from barnraise.planning.lines import HOME_LINE, Line, parse_line
from barnraise.planning.plan import Plan
from barnraise.planning.runtime_model import Choice, StepTime, Swarm, choose_strategy
from barnraise.planning.write_advice import PlanRequest, describe_write_limit
from barnraise.spec import preset

SWARM_PANEL = "Machines that train together"
CREW_PANEL = "Machines that train as one"
GPU_PANEL = "A GPU that is not here (with --device cuda)"
ASSUMED_GPU_MEMORY = 24 * 10**9
ASSUMED_LAUNCHES = 150_000  # kernels/s that Python starts on a PC
MOST_CARDS = 16  # of a machine that is planned for
MOST_MACHINES = 100  # of one kind in a crew that is planned for
SHORT_TRAFFIC = 10_000  # bytes; less is shown in bytes
# AdamW's parameters per second on an assumed GPU, by dtype and bits of the moments.
ASSUMED_UPDATE_RATES = (
    ("float32", 32, 2e10),
    ("bfloat16", 32, 8e9),
    ("float32", 8, 5e9),
    ("bfloat16", 8, 4e9),
)


@dataclass(frozen=True)
class PlanningOptions:
    """A GPU that this machine does not have, and the run and machines that would train in it."""

    gpu_tflops: float = option(
        60.0, "Its sustained bf16 speed in TFLOP/s.", min=0.1, rich_help_panel=GPU_PANEL
    )
    gpu_link: str = option(
        "20GB", "Bytes a second between it and memory.", rich_help_panel=GPU_PANEL
    )
    machines: int = option(
        10, "Machines like this one.", min=1, max=10_000, rich_help_panel=SWARM_PANEL
    )
    optimizer: Literal["adamw", "muon"] = option("adamw", "The run's optimizer.")
    line: str = option(
        "15/112/23",
        "Their lines: Mb/s up / Mb/s down / ms. The default is the global median.",
        rich_help_panel=SWARM_PANEL,
    )
    crew: str = option(
        "",
        'Machines of one crew, its lead first: RAM+GPU memory, like "16GB+12GB,2x16GB,8GB".',
        rich_help_panel=CREW_PANEL,
    )
    boundary: int | None = option(
        None,
        "Bits of what passes between a crew's machines: 32, 16 or 8 (default: as its lines need).",
        rich_help_panel=CREW_PANEL,
    )

    def parse_line(self) -> Line:
        """Return the line.

        Raises:
            StateError: The text is not a line.
        """
        try:
            return parse_line(self.line)
        except ValueError as error:
            raise StateError(f"--line: {error}") from None


def plan(
    model: Annotated[str, typer.Option(help="A preset, like gpt2-1.5b.")],
    machine: MachineOptions,
    resources: ResourceOptions,
    sequences: Annotated[int, typer.Option(min=1, max=65536, help="Sequences of one step.")] = 8,
    *,
    assumed: PlanningOptions,
    as_json: JsonOption = False,
) -> None:
    """Show how a model would train here, or with the limits given.

    Dry run: it shows where the state lies, what overlaps and the time of a step.
    """
    shape = preset(model)
    line = assumed.parse_line()
    state_dir = open_state_dir(machine.home)
    limits = resources.apply_to(state_dir.limits)
    if assumed.crew:
        hosts = measure_machine(state_dir, dataclasses.replace(machine, device="cpu"), limits)
        request = PlanRequest(hosts, shape, limits, sequences, assumed.optimizer)
        crew = plan_assumed_crew(request, assume_crew(hosts, assumed), line, assumed.boundary)
        note = (
            "The machines are assumed: this one's processor and disk, and GPUs of "
            f"{assumed.gpu_tflops:g} TFLOP/s with {assumed.gpu_link}/s to them."
        )
        print_crew_plan(model, crew, note, as_json)
        return
    sizes = parse_card_sizes(machine.device)
    is_for_gpu = machine.device.lower().startswith("cuda")
    # A GPU may be planned for that is not here: measure what is.
    present = machine
    if sizes or is_for_gpu:
        present = dataclasses.replace(machine, device="")
    hardware = measure_machine(state_dir, present, limits)
    note = ""
    if sizes:
        hardware = assume_cards(hardware, assumed, sizes)
        note = (
            f"The GPUs are assumed: {assumed.gpu_tflops:g} TFLOP/s each, and {assumed.gpu_link}/s "
            "to it."
        )
    elif is_for_gpu and hardware.device == "cpu":
        hardware = assume_gpu(hardware, assumed, limits.device_memory or ASSUMED_GPU_MEMORY)
        note = (
            f"No GPU was measured here: {assumed.gpu_tflops:g} TFLOP/s and {assumed.gpu_link}/s "
            "to it are assumed."
        )
    elif is_for_gpu:
        hardware = measure_machine(state_dir, machine, limits)
    elif limits.device_memory and hardware.device == "cpu":
        note = (
            "No GPU here: the layers being computed are kept in this much of the RAM. "
            "--device cuda assumes a GPU."
        )
    hardware = extend_to_limits(hardware, limits)
    request = PlanRequest(hardware, shape, limits, sequences, assumed.optimizer)
    cards = request.choose_cards(advise=True)
    training_plan = cards.plan
    step = StepTime(training_plan.step_seconds, 0.0, training_plan.step_tokens)
    choice = choose_strategy(Swarm(assumed.machines, shape.parameters, line, step))
    advice = describe_write_limit(request, training_plan)
    if as_json:
        fields = _plan_fields(training_plan, note) | {"advice": advice}
        priced = [dataclasses.asdict(each) for each in cards.choices]
        print_json(fields | {"cards": priced, "exchange": dataclasses.asdict(choice)})
        return
    names = render.name_cards(render.find_cards(training_plan, hardware))
    heading = f"[bold]{model}[/] on {escape(names)}, {format_parameters(shape.parameters)}"
    out.print(heading, "", sep="\n")
    out.print(
        render.build_figures_table(training_plan),
        "",
        render.build_state_table(training_plan),
        "",
        sep="\n",
    )
    if cards.choices:
        out.print(render.build_choices_table(cards), "", sep="\n")
    if not training_plan.ranks:  # whose operations are torch's
        timeline = render.draw_timeline(training_plan, cards.hardware, out.width)
        out.print(*timeline, sep="\n", no_wrap=True, crop=True)
    _print_choice(choice, assumed.machines, line)
    for remark in filter(None, (advice, note)):
        out.print(f"\n[yellow]{escape(remark)}[/]")


def _print_choice(choice: Choice, machines: int, line: Line) -> None:
    """Print what each exchange strategy would cost on a line, and which suits it."""
    name = "home lines" if line == HOME_LINE else "lines"
    out.print(f"\n[bold]{machines:,} such machines[/] on {name}, {line}", "", sep="\n")
    strategies = choice.fastest_of_each()
    table = new_table("exchange", "", "tokens/s", "computing", "per token")
    for column in table.columns:
        column.no_wrap = bool(column.header)  # on a narrow terminal only the description wraps
    table.columns[1].overflow = "fold"
    for column in table.columns[2:]:
        column.justify = "right"
    for each in strategies:
        mark = "[bold]" if each is choice.chosen else ""
        every = f", every {each.round_steps} steps" if each.round_steps > 1 else ""
        table.add_row(
            f"{mark}{each.strategy}",
            f"{mark}{each.detail}{every}",
            f"{mark}{each.tokens_per_second:,.0f}",
            f"{mark}{format_share(each.utilisation)}",
            f"{mark}{_format_traffic(each.bytes_per_token)}",
        )
    sentence = f"Auto would choose {choice.chosen.strategy}: {choice.reason}"
    out.print(table, "", sentence, sep="\n")


def _format_traffic(bytes_per_token: float) -> str:
    """Format what a token costs a line; of small models that is less than a kilobyte."""
    if bytes_per_token < SHORT_TRAFFIC:
        return f"{bytes_per_token:,.0f} B"
    return format_bytes(bytes_per_token)


def assume_crew(host: Hardware, assumed: PlanningOptions) -> list[tuple[str, Hardware]]:
    """Return the machines of `--crew` with their names: the host's, but for memory and GPU.

    Raises:
        StateError: a part is no size.
    """
    machines: list[tuple[str, Hardware]] = []
    for part in assumed.crew.lower().split(","):
        count, sizes = _split_count(part, "--crew", MOST_MACHINES)
        memory, _, card = sizes.partition("+")
        hardware = dataclasses.replace(host, memory=parse_bytes(memory), memory_available=0)
        name = format_bytes(hardware.memory)
        if card:
            hardware = assume_gpu(hardware, assumed, parse_bytes(card))
            name = f"{name} + {format_bytes(hardware.device_memory_free)} GPU"
        machines += [(name, hardware)] * count
    return [(f"{number}: {name}", each) for number, (name, each) in enumerate(machines, 1)]


def parse_card_sizes(text: str) -> list[int]:
    """Return the bytes of memory of assumed cards, like "2x24GB,12GB"; none for names of cards.

    Raises:
        StateError: a part is no size, or there are too many.
    """
    if not text[:1].isdigit():
        return []
    sizes: list[int] = []
    for part in text.lower().split(","):
        count, size = _split_count(part, "--device", MOST_CARDS)
        sizes += [parse_bytes(size)] * count
    if len(sizes) > MOST_CARDS:
        raise StateError(f"--device: a machine has 1 to {MOST_CARDS} cards, not {len(sizes)}")
    return sizes


def _split_count(part: str, option: str, most: int) -> tuple[int, str]:
    """Return how many machines or cards a part like "2x24GB" names, and what follows.

    Raises:
        StateError: they are none, or more than there can be.
    """
    count, _, size = part.strip().rpartition("x")
    try:
        number = int(count or 1)
    except ValueError:
        number = 0
    if not 1 <= number <= most:
        raise StateError(
            f"{option}: '{part.strip()[:40]}' is no machine; write 24GB, or 2x24GB for several, "
            f"at most {most}"
        )
    return number, size


def assume_cards(host: Hardware, gpu: PlanningOptions, sizes: list[int]) -> Hardware:
    """Return the host with assumed GPUs of so many bytes of free memory."""
    first, *others = (
        dataclasses.replace(
            assume_gpu(host, gpu, size),
            device_index=index,
            name=f"an assumed GPU of {format_bytes(size)}",
        )
        for index, size in enumerate(sizes)
    )
    return dataclasses.replace(first, others=tuple(others))


def assume_gpu(host: Hardware, gpu: PlanningOptions, memory: int) -> Hardware:
    """Return the host with an assumed GPU, whose other rates are those of typical GPUs.

    So many bytes of the GPU's `memory` are free.
    """
    flops = gpu.gpu_tflops * 1e12
    slow = ((1024, FP32_SHARE * flops),)
    link = parse_bytes(gpu.gpu_link)
    if link == 0:
        raise StateError("--gpu-link: 0 would bring nothing to the GPU; write it like 20GB")
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
        products=(MatmulRates("float32", slow, slow),),
        attention_contexts=(),
        attention_heads=(),
        attention_backward=0.4 * flops,
        logits=(),
        launches=ASSUMED_LAUNCHES,
        updates=(*host.updates, *updates),
    )


def _plan_fields(training_plan: Plan, note: str) -> dict[str, object]:
    """Return the plan with the derived figures that `--json` prints."""
    return dataclasses.asdict(training_plan) | {
        "tokens": training_plan.step_tokens,
        "tokens_per_second": training_plan.tokens_per_second,
        "state_bytes": render.sum_state_bytes(training_plan),
        "sentence": render.describe_plan(training_plan),
        "assumed": note,
    }
