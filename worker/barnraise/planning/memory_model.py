"""Compute the bytes that a plan takes on each tier. Pure.

Counted are what the store and the buffers allocate, to the page, the activations of a step, and
what the work between two steps takes. Tested against measurements.
"""

import math

from barnraise.planning import cost_model
from barnraise.planning.plan import GPU_TILE, Plan, round_to_pages
from barnraise.planning.program import ADDED_SLOTS
from barnraise.spec import MAX_PROMPT_TOKENS, MAX_PROMPTS
from barnraise.spec.architecture import MicroBatch
from barnraise.spec.architectures import architecture_of

HELD_OUT = 32  # sequences over which the validation loss is taken

# Copies of inputs to RAM that may be under way when another begins.
COPIES_OUT = 2

# Samples that a worker writes for the run's page.
SAMPLE_TOKENS = 64  # new tokens of a sample
SAMPLE_WINDOW = MAX_PROMPT_TOKENS + SAMPLE_TOKENS  # of a prompt and its sample together
PREFILL_CHUNK = 64  # tokens of a prompt that pass a layer at a time
CHOICE_BYTES = 40  # of the choice of a token, for each token of the vocabulary

# Bytes an element while a round becomes an update.
ACCUMULATE_BYTES = 16  # of a tile: a round's step is added to the residual
ENCODE_BYTES = 7  # of a fragment: the integers, the payload and its parts
CODEC_BYTES = 32  # of the elements that the codec works on at once
CODEC_ELEMENTS = 1 << 17
APPLY_BYTES = 5  # of a fragment: an update and its payload are added to the anchor
REPLICA_TILE_BYTES = 4  # of a tile of the replica at the same time
DECODE_BYTES = 9  # of a fragment: an update is decoded and added to another

# Elements updated at a time; `swap/tile_threads.py` takes these numbers from here.
CPU_TILE = 1 << 19
TILE_BLOCK = 2048  # tiles begin on multiples of it
GPU_PIECE = 1 << 20  # elements that are converted at a time between steps, where a device has them
ROUNDING_BYTES = 1 << 20  # a GPU's allocator hands out multiples of 512 bytes
PIECE_ELEMENT_BYTES = 16  # of a piece: master, what is added to it, and their conversions
# fp32 buffers of one tile that a thread needs, by the weights' dtype and the moments' bits.
TILE_BUFFERS = {
    ("float32", 32): 1,
    ("float32", 8): 3,
    ("bfloat16", 32): 2,
    ("bfloat16", 8): 5,
}


def device_bytes(plan: Plan) -> int:
    """Return the bytes of device memory apart from RAM; 0 on a machine without a device.

    Of several devices it is the one that needs most.
    """
    if plan.devices:
        return max(all_device_bytes(plan))
    if not plan.staged:
        return 0
    size = _compute_bytes(plan) + _state_bytes(plan, "device")
    if plan.device == "cpu":  # a window of RAM, in which nothing but the steps is computed
        return size + activations(plan)
    working = _working_on_device(plan)
    temporary = max(working, _sampling_on_device(plan, _prompts_within(plan, working)))
    return size + scratch_bytes(plan, plan.device) + temporary + ROUNDING_BYTES


def all_device_bytes(plan: Plan) -> list[int]:
    """Return the bytes of memory of each device. Only the first one works between the steps.

    Several devices leave the norms to the host.
    """
    first, *others = plan.device_plans
    sizes = [device_bytes(first)]
    if others and first.device != "cpu" and not plan.any_on_device:
        sizes[0] -= scratch_bytes(first, first.device)
    for each in others:
        rounding = 0 if each.device == "cpu" else ROUNDING_BYTES
        sizes.append(_compute_bytes(each) + activations(each) + rounding)
    return sizes


def host_bytes(plan: Plan) -> int:
    """Return the bytes of RAM at the worst moment."""
    size = _state_bytes(plan, "host") + _transfer_bytes(plan)
    size += plan.threads * scratch_bytes(plan)
    size += boundary_bytes(plan)
    if plan.staged and plan.device == "cpu":  # the optimizer works while the blocks compute
        size += matrix_bytes(plan)
    if plan.staged:
        size += _waiting_bytes(plan) + _scalar_bytes(plan)
        size += _added_bytes(plan)
        return size + max(between_steps(plan), saving_bytes(plan))
    return size + _compute_bytes(plan) + max(activations(plan), between_steps(plan))


def boundary_bytes(plan: Plan) -> int:
    """Return the bytes of activations that wait for a crew's other machines, or come from them."""
    if not plan.is_stage:
        return 0
    return plan.micro_batches * cost_model.stream_bytes(plan.model, plan.sequences)


def scratch_bytes(plan: Plan, device: str = "cpu") -> int:
    """Return the bytes of one thread that computes norms and updates."""
    threads = plan.threads if device == "cpu" else 1
    largest_tile = CPU_TILE if device == "cpu" else GPU_TILE
    blocks = plan.largest_fragment // TILE_BLOCK
    blocks_per_thread = -(-blocks // threads)
    tile = min(largest_tile, max(1, blocks_per_thread) * TILE_BLOCK)
    buffers = TILE_BUFFERS[plan.dtype, plan.moments_bits]
    if device != "cpu" and not plan.any_on_device:
        buffers = 1  # for norms: no fragment is updated there
    return 4 * tile * buffers


def matrix_bytes(plan: Plan) -> int:
    """Return the bytes in which Muon updates a tile, with the tile itself if it is moved; or 0."""
    layouts = plan.tile_layouts(1)
    matrices = [matrix for layout in layouts for matrix in layout.matrices]
    if not matrices:
        return 0
    # Split weights are joined: of one matrix, or later of all vectors of the tile.
    joined = cost_model.FP32_BYTES if plan.dtype == "bfloat16" else 0
    size = max(
        cost_model.newton_schulz_bytes(*matrix.short_and_long) + joined * matrix.elements
        for matrix in matrices
    )
    size = max(size, joined * max(layout.second_moments for layout in layouts))
    if plan.device == "cpu" or all(plan.weights[i] == "device" for i in plan.blocks):
        return size
    record = max(plan.tile_record_bytes("moments", 1))
    elements = max(layout.elements for layout in layouts)
    gradient = cost_model.FP32_BYTES if plan.host_gradient_buffers else 0
    return size + record + (plan.streamed_bytes + gradient) * elements


def _state_bytes(plan: Plan, tier: str) -> int:
    """Return the bytes of the records that a tier holds."""
    size = 0
    for kind, tiers in (("weights", plan.weights), ("moments", plan.moments)):
        size += sum(plan.total_bytes(kind, i) for i in plan.ends if tiers[i] == tier)
        size += tiers[1:-1].count(tier) * plan.total_bytes(kind, 1)
    if plan.exchange == tier:
        size += sum(plan.all_bytes(kind) for kind in ("anchor", "momentum", "feedback"))
    return size


def _compute_bytes(plan: Plan) -> int:
    """Return the bytes of slots and gradients where the blocks are computed."""
    block = plan.fragments[1].size
    size = plan.slots * plan.record_bytes("weights", block)
    if plan.staged:
        size += sum(
            plan.record_bytes("weights", plan.fragments[i].size)
            for i in plan.ends
            if plan.weights[i] != "device"
        )
    buffers = sum(map(plan.has_gradient_buffer, plan.blocks))
    if buffers < len(plan.blocks):
        size += plan.gradient_slots * round_to_pages(4 * block)
    size += sum(round_to_pages(4 * plan.fragments[i].size) for i in plan.ends)
    size += buffers * round_to_pages(4 * block)
    if plan.ends and plan.model.tied_head:  # whose gradient has two parts
        size += round_to_pages(4 * plan.model.vocabulary * plan.model.width)
    return size


def _added_bytes(plan: Plan) -> int:
    """Return the bytes of the buffers in which other devices' gradients wait to be added."""
    sizes = [plan.fragments[i].size for i in (*[1] * ADDED_SLOTS, *plan.ends)]
    return (len(plan.device_plans) - 1) * sum(round_to_pages(4 * size) for size in sizes)


def _transfer_bytes(plan: Plan) -> int:
    """Return the bytes of the ring, of blocks between disk and device, and of spare tiles."""
    size = 0
    if plan.staged and "disk" in plan.weights:
        size += plan.host_slots * plan.record_bytes("weights", plan.fragments[1].size)
    if any(map(plan.uses_ring, plan.local_fragments)):
        size += plan.ring * plan.ring_bytes()
    if plan.on_disk:
        tiles = 6 if plan.any_on_device else 4
        size += tiles * plan.record_bytes("anchor", plan.largest_tile)
        size += plan.largest_record_bytes("moments")
    return size


def _waiting_bytes(plan: Plan) -> int:
    """Return the bytes of gradients and activations that a device has moved to RAM."""
    size = plan.host_gradient_buffers * round_to_pages(4 * plan.fragments[1].size)
    ends = filter(plan.moves_gradient, plan.ends)
    size += sum(round_to_pages(4 * plan.fragments[i].size) for i in ends)
    stream = round_to_pages(cost_model.stream_bytes(plan.model, plan.sequences))
    return size + len(plan.inputs_in_ram) * plan.micro_batches * stream


def saving_bytes(plan: Plan) -> int:
    """Return the bytes of the copies of a device's moments, fp32, with which a checkpoint is saved.

    A state on disk is its own checkpoint, and is written record by record.
    """
    if plan.on_disk:
        return 0
    sizes = zip(plan.fragments, plan.moments, strict=True)
    return sum(8 * fragment.size for fragment, tier in sizes if tier == "device")


def _scalar_bytes(plan: Plan) -> int:
    """Return the bytes of the norms that a GPU copies to RAM for clipping layer by layer."""
    scalars = plan.last_fragment + 1 + len(plan.device_plans)
    return round_to_pages(8 * scalars) if copies_norms(plan) else 0


def copies_norms(plan: Plan) -> bool:
    """Return whether the host reads norms in a step, without waiting for a GPU's other kernels."""
    return plan.device != "cpu" and plan.clipping != "exact"


def _working_on_device(plan: Plan) -> int:
    """Return the bytes of device memory that steps and the work between them take, by turns."""
    return max(activations(plan), evaluating_on_device(plan), _conversion_bytes(plan))


def _sampling_on_device(plan: Plan, prompts: int) -> int:
    """Return the bytes of device memory that generating text for so many prompts takes."""
    if plan.is_stage:  # a crew generates none
        return 0
    model = plan.model
    window = min(SAMPLE_WINDOW, model.context)
    streams = prompts * (_cache_bytes(plan) + 4 * window * model.width)
    table_width = model.width if model.tied_head else 0  # another lies with the final norm
    head = 4 * model.vocabulary * (table_width + 2)
    block = 4 * plan.fragments[1].size + _prefill_bytes(plan)
    return 4 * plan.fragments[-1].size + streams + max(head, block)


def _prefill_bytes(plan: Plan) -> int:
    """Return the bytes of a layer's work on a part of a prompt."""
    model = plan.model
    window = min(SAMPLE_WINDOW, model.context)
    chunk = min(PREFILL_CHUNK, window)
    streams = math.ceil(architecture_of(model).block_streams(model).cached * model.width)
    return 4 * chunk * (streams + 2 * model.heads * window)


def evaluating_on_device(plan: Plan) -> int:
    """Return the bytes of device memory that validation takes: a sequence at a time, in fp32."""
    model = plan.model
    stream = cost_model.stream_bytes(model, 1)
    tokens = 8 * (model.context + 1)
    table = 4 * plan.fragments[0].size
    block = 4 * plan.fragments[1].size
    architecture = architecture_of(model)
    forward = architecture.forward_peak_bytes(model, MicroBatch(1, device=plan.device))
    head = cost_model.head_peak_bytes(model, 1, device=plan.device, with_gradients=False)
    embedding = table + architecture.embed_peak_bytes(model, 1)
    in_head = _head_weight_bytes(plan) + stream + head
    in_ends = max(embedding, in_head) if plan.ends else 0
    return tokens + max(in_ends, block + stream + forward)


def _conversion_bytes(plan: Plan) -> int:
    """Return the bytes of adding updates to fragments on the device, and of loading moments."""
    resident = [i for i, tier in enumerate(plan.weights) if tier == "device"]
    largest = max((plan.fragments[i].size for i in resident), default=0)
    return PIECE_ELEMENT_BYTES * min(GPU_PIECE, largest)


def activations(plan: Plan) -> int:
    """Return the bytes of a step's tensors at the worst moment, besides the static buffers."""
    model = plan.model
    stream = cost_model.stream_bytes(model, plan.sequences)
    retained = plan.retained_blocks
    inputs_in_group = 0
    if plan.kept_inputs == "group":
        inputs_in_group = max(len(group) for group in plan.backward_groups) - 1
    near = len(plan.stored_inputs) - len(plan.inputs_in_ram)
    # Each micro-batch passes from group to group, and its kept inputs wait.
    waiting = (near + 1) * plan.micro_batches * stream + _copied_inputs(plan) * stream

    architecture = architecture_of(model)
    batch = MicroBatch(plan.sequences, plan.dtype, plan.threads, plan.device)
    saved = architecture.saved_bytes(model, batch)
    graphs = retained * plan.micro_batches * saved
    if retained:
        graphs += plan.micro_batches * stream
    backward = architecture.backward_peak_bytes(model, batch)
    if plan.deterministic:
        backward += cost_model.deterministic_bytes(model, plan.sequences)
    head = 0
    if plan.ends:
        head = cost_model.head_peak_bytes(
            model, plan.sequences, dtype=plan.dtype, device=plan.device
        )
    forward = architecture.forward_peak_bytes(model, batch)
    retained_backward = backward - saved + stream if retained else 0
    with_graphs = graphs + max(head, forward, retained_backward)

    # Blocks are recomputed when the graphs above them are gone, except those of their own group.
    recomputed = 0
    graphs_of_groups = [
        len(group) - plan.recomputed_blocks(group)
        for group in plan.backward_groups
        if group[0] < plan.first_retained
    ]
    if graphs_of_groups:
        recomputed = backward + max(graphs_of_groups) * plan.micro_batches * saved
    # Where the blocks are computed, Muon's updates take turns with them.
    updated = 0
    if plan.device != "cpu" or not plan.staged:
        updated = graphs + matrix_bytes(plan)
    tokens = 8 * plan.micro_batches * plan.sequences * (model.context + 1)
    return waiting + inputs_in_group * stream + max(with_graphs, recomputed, updated) + tokens


def _copied_inputs(plan: Plan) -> int:
    """Return how many inputs at most are being copied to RAM, or back from there."""
    far = set(plan.inputs_in_ram)
    if not far:
        return 0
    in_group = max(len(far.intersection(group)) for group in plan.backward_groups)
    # One group's are computed with while another's come back.
    return max(min(len(far) * plan.micro_batches, COPIES_OUT + 1), 2 * in_group)


def between_steps(plan: Plan) -> int:
    """Return the bytes of evaluating, ending a round and applying updates, at the worst moment."""
    largest = plan.largest_fragment
    tile = min(plan.largest_tile, largest)
    encoding = ENCODE_BYTES * largest + CODEC_BYTES * min(largest, CODEC_ELEMENTS)
    applying = APPLY_BYTES * largest + REPLICA_TILE_BYTES * tile
    ending_round = max(encoding, ACCUMULATE_BYTES * tile, applying)
    if plan.staged:
        ending_round += 4 * largest
    return max(_evaluating_bytes(plan), ending_round, DECODE_BYTES * largest, _sampling_bytes(plan))


def _unpacking_bytes(plan: Plan, i: int) -> int:
    """Return the bytes of unpacking a fragment from the anchor into fp32.

    A fragment of an anchor on disk is a copy, which is freed when it is unpacked.
    """
    copies = 2 if plan.exchange == "disk" else 1
    return copies * 4 * plan.fragments[i].size


def _head_weight_bytes(plan: Plan) -> int:
    """Return the bytes of the fragments, in fp32, that hold the final norm and the head's table."""
    table, _ = plan.model.head_table
    return 4 * sum(plan.fragments[i].size for i in {table, plan.last_fragment})


def _evaluating_bytes(plan: Plan) -> int:
    """Return the bytes of RAM that validation takes: one fragment's weights, and all streams."""
    model = plan.model
    unpacked_block = _unpacking_bytes(plan, 1)
    unpacked_table = max((_unpacking_bytes(plan, i) for i in plan.ends), default=0)
    streams = HELD_OUT * (cost_model.stream_bytes(model, 1) + 8 * (model.context + 1))
    if plan.device != "cpu":  # which computes; here are the streams, and what is unpacked for it
        return streams + max(unpacked_table, unpacked_block)
    block = 4 * plan.fragments[1].size
    batch = MicroBatch(plan.sequences, threads=plan.threads)
    forward = architecture_of(model).forward_peak_bytes(model, batch)
    head = cost_model.head_peak_bytes(model, plan.sequences, with_gradients=False)
    in_block = max(unpacked_block, block + forward)
    in_head = max(unpacked_table, _head_weight_bytes(plan) + head)
    return streams + max(in_block, in_head if plan.ends else 0)


def sampled_at_once(plan: Plan) -> int:
    """Return for how many prompts a worker generates text at the same time.

    All of them if their keys and values take no more memory than the tokens over which the
    validation loss is taken, and on a device no more than all other work; at least one.
    """
    if plan.device == "cpu":
        streams = HELD_OUT * cost_model.stream_bytes(plan.model, 1)
        return max(1, min(MAX_PROMPTS, streams // _cache_bytes(plan)))
    return _prompts_within(plan, _working_on_device(plan))


def _prompts_within(plan: Plan, working: int) -> int:
    """Return for how many prompts a device generates text in so many bytes; at least one."""
    counts = range(MAX_PROMPTS, 1, -1)
    return next((n for n in counts if _sampling_on_device(plan, n) <= working), 1)


def _cache_bytes(plan: Plan) -> int:
    """Return the bytes of one sample's keys and values, in all layers."""
    window = min(SAMPLE_WINDOW, plan.model.context)
    return 2 * 4 * window * plan.model.key_value_width * plan.model.layers


def _sampling_bytes(plan: Plan) -> int:
    """Return the bytes of RAM that generating text takes at the worst moment."""
    if plan.is_stage:  # a crew generates none
        return 0
    model = plan.model
    table, block = 4 * plan.fragments[0].size, 4 * plan.fragments[1].size
    unpacked_table, unpacked_block = _unpacking_bytes(plan, 0), _unpacking_bytes(plan, 1)
    if not model.tied_head:  # the head stays in memory with the final norm
        unpacked_table = max(unpacked_table, table + _unpacking_bytes(plan, plan.last_fragment))
        table += 4 * plan.fragments[-1].size
    choice = CHOICE_BYTES * model.vocabulary
    if plan.device != "cpu":  # which has the keys and values, and the layer's weights
        return max(unpacked_table, table + max(unpacked_block, choice))
    window = min(SAMPLE_WINDOW, model.context)
    prompts = sampled_at_once(plan)
    caches = prompts * _cache_bytes(plan)
    streams = prompts * 4 * window * model.width
    working = max(unpacked_block, block + _prefill_bytes(plan), choice)
    return caches + max(unpacked_table, table + streams + working)
