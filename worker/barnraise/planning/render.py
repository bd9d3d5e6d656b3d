"""Show a plan to people: a sentence, tables of its state and figures, and a step's timeline."""

from collections.abc import Iterable
from typing import Any, cast

from rich.table import Table
from rich.text import Text

from barnraise.formats import format_bytes, format_seconds
from barnraise.planning.card_choice import CardChoice, name_cards
from barnraise.planning.hardware import Hardware, printable_name
from barnraise.planning.plan import STATE_KINDS, Plan
from barnraise.planning.program import LaneName, OperationKind
from barnraise.planning.simulator import Span, StepSimulation
from barnraise.protocol.reports import PlanView
from barnraise.spec import MUON

TIERS = {"device": "GPU", "host": "memory", "disk": "disk"}
SAFETY = {
    "round": "in memory; a checkpoint on disk once a round",
    "exact": "every step is committed to disk: a crash costs the unfinished one",
    "restart": "written in place: a crash costs the round and the optimizer's moments",
}
# From the top of the timeline down.
LANES = (
    LaneName.IN,
    LaneName.COMPUTE,
    LaneName.OUT,
    LaneName.OPTIMIZER,
    LaneName.READ,
    LaneName.WRITE,
)
# The mark and its style for a column of the timeline, by the operation that fills most of it.
MARKS = {
    OperationKind.EMBED: ("e", "cyan"),
    OperationKind.FORWARD: ("▓", "cyan"),
    OperationKind.HEAD: ("h", "magenta"),
    OperationKind.BACKWARD: ("▒", "blue"),
    OperationKind.EMBED_BACKWARD: ("e", "blue"),
    OperationKind.UPDATE: ("█", "green"),
    OperationKind.COMMIT: ("c", "yellow"),
    OperationKind.SPILL: ("s", "yellow"),
}
LEGEND = "▓ forward ▒ backward h head e embedding █ update ■ moving bytes"
HALF = 0.5  # a column that is busy for more than this part of its time shows its mark


def count_blocks_in_memory(plan: Plan) -> int:
    """Count the blocks whose training state stays in memory or on the device."""
    return sum("disk" not in (plan.weights[i], plan.moments[i]) for i in plan.blocks)


def describe_plan(plan: Plan) -> str:
    """Describe the plan in one sentence of at most 300 characters."""
    layers = len(plan.blocks)
    resident = count_blocks_in_memory(plan)
    groups = len(plan.forward_groups)
    where = "on the CPU" if plan.device == "cpu" else "on the GPU, fed from memory"
    if plan.devices:
        kind = "windows of RAM" if plan.device == "cpu" else "GPUs"
        where = f"on {len(plan.devices)} {kind}, fed from one copy in memory"
    if plan.ranks:
        kind = "processes" if plan.device == "cpu" else "GPUs"
        where = f"on {len(plan.ranks)} {kind}, each with a part of the state"
        if plan.tensor > 1:
            where += f", {plan.tensor} of them splitting each layer"
    if not plan.on_disk:
        state = "all state stays in memory"
    elif resident:
        state = f"{resident} of {layers} layers stay in memory, the others come from disk"
    else:
        state = "the layers come from disk, one group after the other"
    passes = (
        f"in {groups} group{'s' if groups > 1 else ''}, "
        f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''} "
        f"of {plan.sequences}"
    )
    if plan.devices:
        passes += f" ({' + '.join(str(share.micro_batches) for share in plan.devices)})"
    return f"{layers} layers {where}, {passes}; {state}; limited by {plan.bottleneck}."


def build_plan_view(plan: Plan, hardware: Hardware) -> PlanView:
    """Build the description of the plan that the worker reports to the coordinator."""
    return PlanView(
        device=printable_name(name_cards(find_cards(plan, hardware))),
        device_bytes=plan.all_device_bytes,
        host_bytes=plan.host_bytes,
        disk_bytes=plan.disk_bytes,
        groups=len(plan.forward_groups),
        micro_batches=plan.micro_batches,
        micro_tokens=plan.sequences * plan.model.context,
        layers=len(plan.blocks),
        resident=count_blocks_in_memory(plan),
        clipping=cast(Any, plan.clipping),  # pydantic verifies both words
        crash_safety=cast(Any, plan.crash_safety),
        binding=plan.bottleneck[:40],
        predicted_seconds=plan.step_seconds,
        disk_written_per_day=plan.written_per_day,
        sentence=describe_plan(plan)[:300],
    )


def find_cards(plan: Plan, hardware: Hardware) -> list[Hardware]:
    """Return the machine with each of the devices that a plan uses."""
    by_name = {card.device_name: card for card in hardware.cards}
    names = [share.name for share in plan.devices] or plan.ranks or [plan.device]
    return [by_name.get(name, hardware) for name in names]


# ---- tables ----


def sum_state_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """Map kind of state → tier → bytes there, with each record counted once."""
    sizes: dict[str, dict[str, int]] = {}
    for kind in STATE_KINDS:
        tiers = {"weights": plan.weights, "moments": plan.moments}.get(
            kind, (plan.exchange,) * (plan.last_fragment + 1)
        )
        for i in plan.local_fragments:
            row = sizes.setdefault(kind, dict.fromkeys(TIERS, 0))
            row[tiers[i]] += plan.total_bytes(kind, i)
    return sizes


def build_state_table(plan: Plan) -> Table:
    """Build the table of the bytes of each kind of state in each tier."""
    shown = [tier for tier in TIERS if tier != "device" or plan.staged]
    heads = {**TIERS, "device": "compute" if plan.device == "cpu" else "GPU"}
    table = Table(box=None, pad_edge=False)
    table.add_column("", min_width=14)
    for tier in shown:
        table.add_column(heads[tier], justify="right", min_width=10)
    rows = sum_state_bytes(plan)
    for kind, row in rows.items():
        table.add_row(kind, *(format_bytes(row[tier]) if row[tier] else "·" for tier in shown))
    whole = {"device": plan.all_device_bytes, "host": plan.host_bytes, "disk": plan.disk_bytes}
    rest = {tier: whole[tier] - sum(row[tier] for row in rows.values()) for tier in shown}
    names = "buffers and activations" if not plan.on_disk else "buffers, activations, second slots"
    table.add_row(names, *(format_bytes(rest[tier]) if rest[tier] > 0 else "·" for tier in shown))
    table.add_row(
        "total",
        *(format_bytes(whole[tier]) if whole[tier] else "·" for tier in shown),
        style="bold",
    )
    return table


def build_choices_table(choice: CardChoice) -> Table:
    """Build the table of the ways to use several cards, with why each was not taken."""
    table = Table(box=None, pad_edge=False)
    table.add_column("cards", style="bold", overflow="fold")
    table.add_column("engine", overflow="fold")
    table.add_column("tokens/s", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for each in choice.choices:
        speed = f"{each.tokens_per_second:,.0f}" if each.tokens_per_second else "·"
        table.add_row(each.cards, each.engine, speed, each.verdict)
    return table


def build_figures_table(plan: Plan) -> Table:
    """Build the table of how the plan trains, and how fast."""
    groups = len(plan.forward_groups)
    model = plan.model
    largest = max(len(group) for group in plan.forward_groups)
    if largest == 1:
        layers = f"{model.layers}, one at a time"
    else:
        layers = f"{model.layers} in {groups} group{'s' * (groups > 1)} of at most {largest}"
    if plan.retained_blocks:
        layers += f"; {plan.retained_blocks} keep their activations"
    clipping = {
        "exact": "by the whole gradient's norm",
        "layer": "by each layer's own norm",
        "none": "none",
    }
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", min_width=14)
    table.add_column(overflow="fold")
    for name, value in (
        ("layers", layers),
        (
            "micro-batches",
            f"{plan.micro_batches} of {plan.sequences} × {model.context:,} tokens, {plan.dtype}",
        ),
        ("clipping", clipping[plan.clipping]),
        ("optimizer", _describe_optimizer(plan)),
        ("crash safety", SAFETY[plan.crash_safety]),
        (
            "one step",
            f"{format_seconds(plan.step_seconds)} for {plan.step_tokens:,} tokens: "
            f"{plan.tokens_per_second:,.0f} tokens/s",
        ),
        ("limited by", plan.bottleneck),
        ("disk writes", _describe_writes(plan)),
    ):
        table.add_row(name, value)
    return table


def _describe_optimizer(plan: Plan) -> str:
    """Describe the optimizer, and the bits of its state."""
    if plan.optimizer == MUON:
        return f"Muon, its momentum in {plan.moments_bits} bits"
    return f"AdamW, its moments in {plan.moments_bits} bits"


def _describe_writes(plan: Plan) -> str:
    """Describe how much the steps write to disk, and how much they may write."""
    writes = "none"
    if plan.written_per_step:
        daily, each = format_bytes(plan.written_per_day), format_bytes(plan.written_per_step)
        writes = f"{daily} a day, {each} a step"
    if plan.daily_write_limit is None:
        return writes
    return f"{writes}; at most {format_bytes(plan.daily_write_limit)} a day"


# ---- timeline ----


def draw_timeline(plan: Plan, hardware: Hardware, width: int = 80) -> list[Text]:
    """Draw one line for each lane that is used in a step, a ruler and a legend.

    A column shows the mark of the operation that fills most of it.
    """
    spans = [span for span in StepSimulation(plan, hardware).spans if span.end > span.begin]
    first = min(span.begin for span in spans)
    last = max(span.end for span in spans)
    columns = max(20, width - 12)
    lines: list[Text] = []
    for name in LANES:
        in_lane = [span for span in spans if span.op.lane is name]
        if in_lane:
            bar = _draw_lane(in_lane, first, last, columns)
            lines.append(Text.assemble((f"{name:<11} ", "bold"), bar))
    ruler = f"{'':<12}0{format_seconds(last - first):>{columns - 1}}"
    return [*lines, Text(ruler, "dim"), Text(f"{'':<12}{LEGEND}", "dim")]


def _draw_lane(spans: Iterable[Span], first: float, last: float, columns: int) -> Text:
    """Draw one lane's line.

    A column shows the mark of the operation that fills most of it, a dot if the lane works in it
    for less than half of the time, and a space if the lane is idle.
    """
    step = (last - first) / columns
    filled: list[dict[OperationKind, float]] = [{} for _ in range(columns)]
    for span in spans:
        first_column = int((span.begin - first) / step)
        last_column = min(columns - 1, int((span.end - first) / step))
        for at in range(first_column, last_column + 1):
            begin = first + at * step
            inside = min(span.end, begin + step) - max(span.begin, begin)
            if inside > 0:
                filled[at][span.op.kind] = filled[at].get(span.op.kind, 0.0) + inside
    bar = Text()
    for column in filled:
        if not column:
            bar.append(" ")
            continue
        mark, style = MARKS.get(max(column, key=lambda kind: column[kind]), ("■", "yellow"))
        bar.append(mark if sum(column.values()) > HALF * step else "·", style)
    return bar
