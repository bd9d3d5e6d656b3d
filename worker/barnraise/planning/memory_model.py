"""How many bytes a plan takes on each tier: what the store and the buffers allocate, to the page, and the activations
of a step and of what is done between steps. Pure; tested against what is measured.
"""

from barnraise.planning import cost_model
from barnraise.planning.plan import STATE_KINDS, Plan, round_to_pages

HELD_OUT = 32  # sequences a validation loss is taken over
OWED = 16  # bytes an element of a tile while a round's step is added to what is owed
ENCODED = 7  # bytes an element of a fragment while it is encoded: integers, payload, its parts
ENCODING, ENCODED_AT_ONCE = (
    32,
    1 << 17,
)  # bytes an element, and elements, that the codec works on at once
SAID, ANCHORED = (
    5,
    4,
)  # bytes an element while an update with its payload is applied, and of a replica tile
DECODED = 9  # bytes an element while an update is decoded and added to another
CPU_TILE, GPU_TILE, BLOCK = (
    1 << 19,
    1 << 22,
    2048,
)  # elements updated at a time: swap/crew.py's; a test compares
BUFFERS = {
    ("float32", 32): 1,
    ("float32", 8): 3,
    ("bfloat16", 32): 2,
    ("bfloat16", 8): 5,
}  # a thread's, of a tile each


def device_bytes(plan: Plan) -> int:
    """Of the compute memory apart from RAM: 0 where there is none."""
    if not plan.staged:
        return 0
    scratch = scratch_bytes(plan, plan.device) if plan.device != "cpu" else 0
    return _compute(plan) + _states(plan, "device") + scratch + activations(plan)


def host_bytes(plan: Plan) -> int:
    """Of RAM, at the worst moment."""
    size = _states(plan, "host") + _between_tiers(plan) + plan.threads * scratch_bytes(plan)
    if plan.staged:
        return size + _waiting(plan) + between_steps(plan)
    return size + _compute(plan) + max(activations(plan), between_steps(plan))


def scratch_bytes(plan: Plan, device: str = "cpu") -> int:
    """Of one thread that takes norms and makes updates."""
    threads, most = (plan.threads, CPU_TILE) if device == "cpu" else (1, GPU_TILE)
    largest = max(fragment.size for fragment in plan.fragments) // BLOCK
    tile = min(most, max(1, -(-largest // threads)) * BLOCK)
    return 4 * tile * BUFFERS[plan.dtype, plan.moments_bits]


def _states(plan: Plan, tier: str) -> int:
    """Of the records a tier holds."""
    size = 0
    for kind in STATE_KINDS:
        tiers = {"weights": plan.weights, "moments": plan.moments}.get(
            kind, (plan.exchange,) * (plan.last_fragment + 1)
        )
        size += sum(plan.total_bytes(kind, i) for i in _ends(plan) if tiers[i] == tier)
        size += tiers[1:-1].count(tier) * plan.total_bytes(kind, 1)
    return size


def _compute(plan: Plan) -> int:
    """Of the slots and gradients where the blocks are computed."""
    block = plan.fragments[1].size
    size = plan.slots * plan.record_bytes("weights", block)
    if plan.staged:
        size += sum(
            plan.record_bytes("weights", plan.fragments[i].size)
            for i in _ends(plan)
            if plan.weights[i] != "device"
        )
    if any(not plan.has_gradient_buffer(i) for i in plan.blocks):
        size += plan.gradient_slots * round_to_pages(4 * block)
    size += sum(round_to_pages(4 * plan.fragments[i].size) for i in _ends(plan))
    size += sum(map(plan.has_gradient_buffer, plan.blocks)) * round_to_pages(4 * block)
    return size + round_to_pages(4 * plan.model.vocabulary * plan.model.width)


def _ends(plan: Plan) -> tuple[int, int]:
    return 0, plan.last_fragment


def _between_tiers(plan: Plan) -> int:
    """Of the ring, of blocks on their way from disk to a device, and of the spare tiles."""
    size = 0
    if plan.staged and "disk" in plan.weights:
        size += plan.host_slots * plan.record_bytes("weights", plan.fragments[1].size)
    if any(plan.uses_ring(i) for i in range(plan.last_fragment + 1)):
        size += plan.ring * plan.ring_bytes()
    if plan.on_disk:
        size += 4 * plan.record_bytes("anchor", plan.tile) + plan.record_bytes("moments", plan.tile)
    return size


def _waiting(plan: Plan) -> int:
    """Of gradients and boundaries in RAM that a device handed over."""
    size = plan.host_gradient_slots * round_to_pages(4 * plan.fragments[1].size)
    size += sum(
        round_to_pages(4 * plan.fragments[i].size)
        for i in _ends(plan)
        if plan.weights[i] != "device"
    )
    if plan.boundaries == "host":
        stream = round_to_pages(cost_model.stream_bytes(plan.model, plan.sequences))
        size += (plan.model.layers + 2) * plan.micro_batches * stream
    return size


def activations(plan: Plan) -> int:
    """What a step's tensors take at the worst moment, besides the static buffers."""
    model, layers = plan.model, plan.model.layers
    stream = cost_model.stream_bytes(model, plan.sequences)
    inner = 0
    if plan.kept_inputs == "group":
        kept = len(
            [g for g in plan.backward_groups if g[0] < plan.last_fragment - plan.retained_blocks]
        )
        inner = max(len(group) for group in plan.backward_groups) - 1
    else:
        kept = layers - plan.retained_blocks
    if plan.boundaries == "host":
        kept = min(kept, 2)
    waiting = (kept + 1) * plan.micro_batches * stream
    as_planned = {"dtype": plan.dtype}
    saved = cost_model.saved_bytes(model, plan.sequences, **as_planned)
    graphs = plan.retained_blocks * plan.micro_batches * saved
    if plan.retained_blocks:
        graphs += plan.micro_batches * stream
    backward = cost_model.backward_peak_bytes(
        model, plan.sequences, threads=plan.threads, **as_planned
    )
    with_graphs = graphs + max(
        cost_model.head_peak_bytes(model, plan.sequences, device=plan.device, **as_planned),
        cost_model.forward_peak_bytes(model, plan.sequences, threads=plan.threads, **as_planned),
        backward - saved + stream if plan.retained_blocks else 0,
    )
    again = 0  # blocks that compute again do so when the graphs above them are gone, but for those of their own group
    for group in plan.backward_groups:
        mine = sum(i >= plan.last_fragment - plan.retained_blocks for i in group)
        if mine < len(group):
            again = max(again, backward + mine * plan.micro_batches * saved)
    transient = max(with_graphs, again)
    tokens = 8 * plan.micro_batches * plan.sequences * (model.context + 1)
    return waiting + inner * stream + transient + tokens


def between_steps(plan: Plan, held_out: int = HELD_OUT) -> int:
    """What validating, harvesting and folding in take at the worst moment, besides the static buffers."""
    model = plan.model
    table, block = 4 * plan.fragments[0].size, 4 * plan.fragments[1].size
    copied = plan.exchange == "disk"  # a fragment of the anchor is then a copy
    streams = held_out * cost_model.stream_bytes(model, 1) + 8 * held_out * (model.context + 1)
    forward = cost_model.forward_peak_bytes(model, plan.sequences, threads=plan.threads)
    head = cost_model.head_peak_bytes(model, plan.sequences, device=plan.device, wanted=False)
    evaluated = max(
        table * (2 if copied else 1),
        table + streams + max(block * (2 if copied else 1), block + forward, head),
    )
    largest = max(fragment.size for fragment in plan.fragments)
    encoded = ENCODED * largest + ENCODING * min(largest, ENCODED_AT_ONCE)
    said = SAID * largest + ANCHORED * min(plan.tile, largest)
    harvested = max(encoded, OWED * min(plan.tile, largest), said) + (
        4 * largest if plan.staged else 0
    )
    return max(evaluated, harvested, DECODED * largest)
