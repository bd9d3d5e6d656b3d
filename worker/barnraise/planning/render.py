"""A plan for people: one sentence, a table of what lies where, and a picture of what overlaps what."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from barnraise.formats import format_bytes, format_seconds
from barnraise.planning.hardware import Hardware
from barnraise.planning.plan import STATE_KINDS, Plan
from barnraise.planning.program import LaneName, OperationKind
from barnraise.planning.simulator import Span, StepSimulation
from barnraise.protocol.reports import PlanView

TIERS = {"device": "GPU", "host": "memory", "disk": "disk"}
SAFETY = {
    "round": "in memory; a checkpoint on disk once a round",
    "exact": "every step is committed to disk: a crash costs the unfinished one",
    "restart": "written in place: a crash costs the round and Adam's moments",
}
LANES = (
    ("copy in", (LaneName.IN,)),
    ("compute", (LaneName.COMPUTE,)),
    ("copy out", (LaneName.OUT,)),
    ("optimizer", (LaneName.OPTIMIZER,)),
    ("disk read", (LaneName.READ,)),
    ("disk write", (LaneName.WRITE,)),
)
MARKS = {  # of what a column of the picture is mostly spent on
    OperationKind.EMBED: ("e", "cyan"), OperationKind.FORWARD: ("▓", "cyan"), OperationKind.HEAD: ("h", "magenta"), OperationKind.BACKWARD: ("▒", "blue"),
    OperationKind.EMBED_BACKWARD: ("e", "blue"), OperationKind.UPDATE: ("█", "green"), OperationKind.COMMIT: ("c", "yellow"),
    OperationKind.SPILL: ("s", "yellow"),
}  # fmt: skip
HALF = 0.5  # of a column's time: from there on it counts as busy throughout


def tokens(plan: Plan) -> int:
    """Of one step."""
    return plan.micro_batches * plan.sequences * plan.model.context


def in_memory(plan: Plan) -> int:
    """Blocks whose training state stays in memory, or on the device."""
    return sum("disk" not in (plan.weights[i], plan.moments[i]) for i in plan.blocks)


def sentence(plan: Plan) -> str:
    """The plan in plain words, at most 300 characters."""
    layers, held, groups = plan.model.layers, in_memory(plan), len(plan.forward_groups)
    where = "on the GPU, fed from memory" if plan.device == "cuda" else "on the CPU"
    if not plan.on_disk:
        state = "everything is kept in memory"
    elif held:
        state = f"{held} of {layers} layers stay in memory, the others come from disk"
    else:
        state = "the layers come from disk, one group after the other"
    passes = f"in {groups} group{'s' if groups > 1 else ''}, {plan.micro_batches} micro-batches of {plan.sequences}"
    return f"{layers} layers {where}, {passes}; {state}; what limits is the {plan.bottleneck}."


def plan_view(plan: Plan, hardware: Hardware) -> PlanView:
    """As the coordinator is told."""
    return PlanView(
        device="".join(c for c in hardware.name if c.isprintable())[:80],
        device_bytes=plan.device_bytes,
        host_bytes=plan.host_bytes,
        disk_bytes=plan.disk_bytes,
        groups=len(plan.forward_groups),
        micro_batches=plan.micro_batches,
        micro_tokens=plan.sequences * plan.model.context,
        layers=plan.model.layers,
        resident=in_memory(plan),
        clipping=plan.clipping,
        crash_safety=plan.crash_safety,
        binding=plan.bottleneck[:40],
        predicted_seconds=plan.step_seconds,
        disk_written_per_day=plan.written_per_day,
        sentence=sentence(plan)[:300],
    )


# ---- the table -----------------------------------------------------------------------------------------------


def state_bytes(plan: Plan) -> dict[str, dict[str, int]]:
    """kind of state → tier → bytes there, each record once."""
    found: dict[str, dict[str, int]] = {}
    for kind in STATE_KINDS:
        tiers = {"weights": plan.weights, "moments": plan.moments}.get(
            kind, (plan.exchange,) * (plan.last_fragment + 1)
        )
        for i, tier in enumerate(tiers):
            row = found.setdefault(kind, dict.fromkeys(TIERS, 0))
            row[tier] += plan.total_bytes(kind, i)
    return found


def where_table(plan: Plan) -> Table:
    """What lies where."""
    shown = [tier for tier in TIERS if tier != "device" or plan.staged]
    heads = {**TIERS, "device": "GPU" if plan.device == "cuda" else "compute"}
    table = Table(box=None, pad_edge=False)
    table.add_column("", min_width=14)
    for tier in shown:
        table.add_column(heads[tier], justify="right", min_width=10)
    rows = state_bytes(plan)
    for kind, row in rows.items():
        table.add_row(kind, *(format_bytes(row[tier]) if row[tier] else "·" for tier in shown))
    whole = {"device": plan.device_bytes, "host": plan.host_bytes, "disk": plan.disk_bytes}
    rest = {tier: whole[tier] - sum(row[tier] for row in rows.values()) for tier in shown}
    names = "buffers and activations" if not plan.on_disk else "buffers, activations, second slots"
    table.add_row(names, *(format_bytes(rest[tier]) if rest[tier] > 0 else "·" for tier in shown))
    table.add_row(
        "together",
        *(format_bytes(whole[tier]) if whole[tier] else "·" for tier in shown),
        style="bold",
    )
    return table


def figures(plan: Plan) -> Table:
    """How it trains, and how fast."""
    groups, model = len(plan.forward_groups), plan.model
    largest = max(len(group) for group in plan.forward_groups)
    kept = f", {plan.retained_blocks} keep what backward needs" if plan.retained_blocks else ""
    clipping = {
        "exact": "by the whole gradient's norm",
        "layer": "by each layer's own norm",
        "none": "none",
    }
    day = (
        f"{format_bytes(plan.written_per_day)} ({format_bytes(plan.written_per_step)} a step)"
        if plan.written_per_step
        else "nothing"
    )
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold", min_width=14)
    table.add_column(overflow="fold")
    for name, value in (
        (
            "layers",
            f"{model.layers} in {groups} group{'s' * (groups > 1)} of {largest} or fewer{kept}",
        ),
        (
            "micro-batches",
            f"{plan.micro_batches} of {plan.sequences} × {model.context:,} tokens, {plan.dtype}",
        ),
        ("clipping", clipping[plan.clipping]),
        ("Adam's moments", f"{plan.moments_bits} bits"),
        ("crash safety", SAFETY[plan.crash_safety]),
        (
            "a step",
            f"{format_seconds(plan.step_seconds)} for {tokens(plan):,} tokens: {tokens(plan) / plan.step_seconds:,.0f} tokens/s",
        ),
        ("what limits", plan.bottleneck),
        ("disk, a day", f"{day} written"),
    ):
        table.add_row(name, value)
    return table


# ---- the picture ---------------------------------------------------------------------------------------------


def timeline(plan: Plan, hardware: Hardware, width: int = 80) -> list[Text]:
    """One line a lane that does anything, over one step in its stride; a column is mostly what its mark says."""
    spans = [span for span in StepSimulation(plan, hardware).spans if span.end > span.begin]
    first, last = min(span.begin for span in spans), max(span.end for span in spans)
    columns = max(20, width - 12)
    lines = []
    for name, lanes in LANES:
        mine = [span for span in spans if span.op.lane in lanes]
        if mine:
            lines.append(Text.assemble((f"{name:<11} ", "bold"), _bar(mine, first, last, columns)))
    ruler = f"{'':<12}0{format_seconds(last - first):>{columns - 1}}"
    return [*lines, Text(ruler, "dim"), Text(f"{'':<12}{LEGEND}", "dim")]


LEGEND = "▓ forward ▒ backward h head e embedding █ update ■ moving bytes"


def _bar(spans: Iterable[Span], first: float, last: float, columns: int) -> Text:
    """A column's mark is that of what fills most of it; a dot where something is done in it, but not for long."""
    step = (last - first) / columns
    filled: list[dict[OperationKind, float]] = [{} for _ in range(columns)]
    for span in spans:
        for at in range(
            int((span.begin - first) / step), min(columns - 1, int((span.end - first) / step)) + 1
        ):
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
