"""Plan ranks that share one model's state by FSDP, and split its blocks among them. Pure.

Each card computes in a process of its own. The state is spread evenly, so that the card with the
least memory and the slowest one decide. What is approximate: blocks split among tensor ranks take
their part of a whole block's time, with the norms; all-gathers hide behind computations as far as
those take longer.
"""

import math
from collections.abc import Iterator
from dataclasses import replace

from barnraise.errors import PlanError
from barnraise.formats import format_bytes
from barnraise.planning import cost_model, memory_model
from barnraise.planning.budgets import CUDA_PROCESS_BYTES, compute_budgets
from barnraise.planning.hardware import Hardware
from barnraise.planning.limits import Limits
from barnraise.planning.plan import Plan, tile_elements
from barnraise.planning.rank_rules import explain_ranks
from barnraise.planning.tile_layout import list_matrices
from barnraise.spec import ADAMW, MUON, ModelSpec
from barnraise.spec.architecture import MicroBatch
from barnraise.spec.architectures import architecture_of

SHARDED_BYTES = 16  # a parameter: fp32 weight, both moments and the gradient
WHOLE_MATRIX_BYTES = 12  # an element: its average gradient, and its direction twice
GATHERED_BLOCKS = 2  # whole at once: the one that computes, and the next
RANK_PROCESS_BYTES = 400_000_000  # of RAM, of each further rank without CUDA's libraries
HOST_COLLECTIVE_BYTES = 1e9  # a second through gloo, on a CPU
CARDS_OF_A_MACHINE = 16  # at most; more ranks are on other machines


def plan_ranks(
    hardware: Hardware,
    model: ModelSpec,
    limits: Limits | None = None,
    step_sequences: int = 8,
    tensor: int = 1,
    optimizer: str = ADAMW,
) -> Plan:
    """Find the fastest plan in which all cards of a machine share the model.

    Raises:
        PlanError: they cannot; the sentence says why.
    """
    limits = limits or Limits()
    ranks = len(hardware.cards)
    if reason := explain_ranks(model, limits, step_sequences, ranks, tensor):
        raise PlanError(reason)
    candidates = [
        _with_predictions(replace(plan, optimizer=optimizer), hardware)
        for plan in _generate_candidates(hardware, model, limits, step_sequences, tensor)
    ]
    if fitting := [plan for plan in candidates if not _explain_shortage(plan, hardware, limits)]:
        return min(fitting, key=lambda plan: plan.step_seconds)
    raise PlanError(_explain_shortage(candidates[-1], hardware, limits))


def _generate_candidates(
    hardware: Hardware, model: ModelSpec, limits: Limits, step_sequences: int, tensor: int
) -> Iterator[Plan]:
    """Yield plans of each micro-batch size, the smallest and slowest last."""
    ranks = len(hardware.cards)
    of_rank = step_sequences * tensor // ranks
    shared = ("device",) * (model.layers + 2)
    blocks = tuple((i,) for i in range(1, model.layers + 1))
    is_common = all(card.dtype == hardware.dtype for card in hardware.cards)
    dtype = limits.precision
    if dtype == "auto":
        is_narrow = hardware.device != "cpu" and is_common
        dtype = hardware.dtype if is_narrow else "float32"
    for sequences in range(of_rank, 0, -1):
        if of_rank % sequences:
            continue
        for retained in (model.layers, model.layers // 2, 0):
            yield Plan(
                model=model,
                device=hardware.device_name,
                threads=max(1, hardware.cores),
                dtype=dtype,
                staged=hardware.device != "cpu",
                sequences=sequences,
                micro_batches=step_sequences // sequences,
                forward_groups=blocks,
                backward_groups=blocks[::-1],
                retained_blocks=retained,
                weights=shared,
                moments=shared,
                clipping="exact",
                tile=tile_elements(model, whole=True),
                ranks=tuple(card.device_name for card in hardware.cards),
                tensor=tensor,
            )


def _with_predictions(plan: Plan, hardware: Hardware) -> Plan:
    seconds, bottleneck = max(_price(plan, card, hardware) for card in hardware.cards)
    return replace(
        plan,
        step_seconds=seconds,
        bottleneck=bottleneck,
        device_bytes=rank_bytes(plan) if plan.staged else 0,
        host_bytes=host_bytes(plan),
    )


def _explain_shortage(plan: Plan, hardware: Hardware, limits: Limits) -> str:
    """Return which memory a plan needs more of than there is; "" if it fits."""
    budgets = compute_budgets(hardware, limits)
    cards = [budgets.device_memory, *budgets.other_devices] if plan.staged else []
    least = min((size for size in cards if size is not None), default=plan.device_bytes)
    for where, need, budget in (
        ("of each card's memory", plan.device_bytes, least),
        ("of RAM", plan.host_bytes, budgets.memory),
    ):
        if need > budget:
            return f"needs {format_bytes(need)} {where}, and may use {format_bytes(budget)}"
    return ""


# ---- memory --------------------------------------------------------------------------------------


def rank_bytes(plan: Plan) -> int:
    """Return the bytes of the memory in which a rank computes."""
    model = plan.model
    first, *blocks, last = plan.fragments
    shards = len(plan.ranks) // plan.tensor
    in_blocks = sum(fragment.size for fragment in blocks) // plan.tensor
    ends = first.size + last.size
    narrow = plan.streamed_bytes
    of_block = SHARDED_BYTES - 4 if plan.optimizer == MUON else SHARDED_BYTES
    state = math.ceil((of_block * in_blocks + SHARDED_BYTES * ends) / shards)
    # What is whole for a while: weights as they compute, and gradients as they are added up.
    block = blocks[0].size // plan.tensor
    whole = GATHERED_BLOCKS * (narrow + 4) * block + (narrow + 4) * ends
    stream = cost_model.stream_bytes(model, plan.sequences)
    architecture = architecture_of(model)
    batch = MicroBatch(plan.sequences, plan.dtype, plan.threads, plan.device)
    saved = architecture.saved_bytes(model, batch)
    kept = plan.retained_blocks * saved + (model.layers - plan.retained_blocks + 2) * stream
    working = max(
        architecture.backward_peak_bytes(model, batch),
        cost_model.head_peak_bytes(model, plan.sequences, plan.dtype, plan.threads, plan.device)
        + 4 * model.vocabulary * model.width,
    )
    # A fragment is gathered from all ranks between steps, and a matrix for Muon's.
    updating = memory_model.matrix_bytes(plan)
    if updating:
        updating += WHOLE_MATRIX_BYTES * max(slot.size for slot in blocks[0].slots)
    between = max(
        8 * max(fragment.size for fragment in plan.fragments),
        memory_model.evaluating_on_device(plan),
        updating,
    )
    return state + max(whole + kept + working, between)


def host_bytes(plan: Plan) -> int:
    """Return the bytes of RAM on rank 0's machine: the exchange's state, and what saves a state."""
    exchange = sum(plan.all_bytes(kind) for kind in ("anchor", "momentum", "feedback"))
    further = min(len(plan.ranks), CARDS_OF_A_MACHINE) - 1
    processes = further * (CUDA_PROCESS_BYTES if plan.staged else RANK_PROCESS_BYTES)
    work = max(memory_model.between_steps(plan), memory_model.saving_bytes(plan))
    own = 0 if plan.staged else rank_bytes(plan)
    return exchange + processes + work + own


# ---- seconds -------------------------------------------------------------------------------------


def _price(plan: Plan, card: Hardware, machine: Hardware) -> tuple[float, str]:
    """Return the seconds of a step on one of a machine's cards, and what takes most of them."""
    model, dtype, layers = plan.model, plan.dtype, plan.model.layers
    of_rank = (model, plan.sequences, dtype)
    shards = len(plan.ranks) // plan.tensor
    passes = plan.micro_batches // shards
    block = cost_model.block_forward_seconds(card, *of_rank)
    block += cost_model.block_backward_seconds(card, *of_rank)
    again = (layers - plan.retained_blocks) * cost_model.block_forward_seconds(card, *of_rank)
    ends = cost_model.head_seconds(card, *of_rank)
    ends += 2 * cost_model.embed_seconds(card, model, plan.sequences)
    compute = passes * ((layers * block + again) / plan.tensor + ends)
    link = collective_rate(machine)
    first, *blocks, last = plan.fragments
    in_blocks = sum(fragment.size for fragment in blocks) / plan.tensor
    edges = first.size + last.size
    # Weights of blocks are gathered for forward and backward, and those of the ends once.
    moved = 2 * plan.streamed_bytes * in_blocks + plan.streamed_bytes * edges
    moved += 4 * (in_blocks + edges)  # gradients, in fp32
    gathering = passes * moved * (shards - 1) / shards / link
    # Each sum of a stream: two in forward, two in its recomputation, two in backward.
    sums = 2 * (2 * layers + layers - plan.retained_blocks)
    stream = cost_model.stream_bytes(model, plan.sequences)
    adding = passes * sums * 2 * stream * (plan.tensor - 1) / plan.tensor / link
    where = "device" if plan.staged else "host"
    rate = card.update_rate(where, "float32", 32)
    updating = (in_blocks + edges) / shards / rate
    if plan.optimizer == MUON:  # each rank gathers all matrices, and computes with them
        shapes = [(matrix.rows, matrix.columns) for matrix in list_matrices(blocks[0])]
        updating = edges / shards / rate + layers * cost_model.muon_seconds(card, shapes)
        whole = layers * blocks[0].size
        adding += 4 * whole * (len(plan.ranks) - 1) / len(plan.ranks) / link
    parts = {"compute": compute, "link": gathering + adding, "optimizer": updating}
    # Only all-gathers and reduce-scatters overlap with the computation.
    step = max(compute, gathering) + adding + updating
    return step, max(parts, key=lambda name: parts[name])


def collective_rate(machine: Hardware) -> float:
    """Return the bytes a second that a rank sends and receives in a collective.

    Cards may have no way to each other but through pinned RAM.
    """
    if machine.device == "cpu":
        return HOST_COLLECTIVE_BYTES
    return min(min(card.to_device, card.from_device) for card in machine.cards)
