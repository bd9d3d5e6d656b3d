"""Scale a line so that a CPU meets it as a gaming GPU meets the real one. Pure.

A CPU computes about a thousand times slower than an RTX 3090. On an unscaled line of 100 Mb/s its
arithmetic takes so long that every way to exchange looks free. What decides is the ratio of the
time that bytes take to the time that arithmetic takes, and every system gets the line that
preserves *its own* ratio, as it would be for a named model on an RTX 3090 behind the named line.

    r       rate of the real line                      `Line`
    F       sustained FLOP/s: of the GPU, of this CPU  `RTX_3090_FLOPS`, `cpu_flops`
    N       parameters                                 of the named model, of the one trained here
    L, d    layers and width                           the same
    b       bytes of an activation                     the same in both

**Systems that send parameters or gradients** send c·N bytes for each step of 6·N·T FLOP. The ratio
of the two times, (c·N/r) / (6·N·T/F), does not contain N. So any model has the GPU's ratio at

    r_here = r · F_here / F_3090

**A pipeline** sends b·d bytes over a boundary for each token, whose arithmetic is 8·N FLOP with N
proportional to L·d². The ratio is (b·d/r) / (8·N/F), proportional to F / (r·L·d): wider and deeper
models do more arithmetic for each activation. The small model here has a smaller L·d, so the line
must be faster by that factor:

    r_here = r · (F_here / F_3090) · (L·d)_3090 / (L·d)_here

The round trip is not scaled: messages are few, and a step here takes as long as on the GPU or
longer, so the delay weighs at most as much as it would there. A pipeline's messages are many; its
microbatches are so large that a stage computes for as long as a message travels.

**Packets are not scaled either.** A packet takes a second on the home line as scaled, and three
handshakes take half a minute; on the real line both are a thousandth. So a system that limits
itself what it sends is limited to the scaled rate, messages included, and its line has room for
packets in addition (`leave_room_for_packets`).
"""

import math
from dataclasses import dataclass, replace

from barnraise.planning.lines import BITS_PER_BYTE, MEGABIT, Line

RTX_3090_FLOPS = 35e12  # sustained in bf16 on the matrix products of a GPT
PACKET_BYTES = 4000  # bytes per second for headers, acknowledgements and handshakes of transports


class LinkError(Exception):
    """A line cannot be scaled; the message says why, in one sentence."""


@dataclass(frozen=True)
class Shape:
    """What of a model decides how many bytes accompany its arithmetic.

    Attributes:
        name: of the model.
        layers: L.
        width: d.
        parameters: N.
    """

    name: str
    layers: int
    width: int
    parameters: float


# GPT-3's table 2.1; the smallest is GPT-2's.
NAMED_MODELS = (
    Shape("GPT 125M", 12, 768, 125e6),
    Shape("GPT 1.3B", 24, 2048, 1.3e9),
    Shape("GPT 6.7B", 32, 4096, 6.7e9),
)


def scale_line(line: Line, cpu_flops: float) -> Line:
    """Return the line for systems that send parameters, gradients or updates.

    Args:
        line: the real one.
        cpu_flops: that one worker sustains here.

    Raises:
        LinkError: The CPU's rate is not above zero.
    """
    return _multiply(line, _compute_ratio(cpu_flops))


def scale_pipeline_line(line: Line, cpu_flops: float, named: Shape, here: Shape) -> Line:
    """Return the line for a pipeline, which sends activations.

    Args:
        line: the real one.
        cpu_flops: that one worker sustains here.
        named: the model that the measurement stands for.
        here: the model that is trained here.

    Raises:
        LinkError: The CPU's rate is not above zero.
    """
    depth_ratio = (named.layers * named.width) / (here.layers * here.width)
    return _multiply(line, _compute_ratio(cpu_flops) * depth_ratio)


def leave_room_for_packets(scaled: Line) -> Line:
    """Return a scaled line with room for what a transport adds to the bytes that it carries.

    It is for systems that limit themselves to the scaled rate, and not for others: they would fill
    the room with what they have to send.

    Args:
        scaled: the line, as scaled.
    """
    room = PACKET_BYTES * BITS_PER_BYTE / MEGABIT
    return replace(
        scaled, up_megabits=scaled.up_megabits + room, down_megabits=scaled.down_megabits + room
    )


def observe_line(line: Line, sent_bytes: float, messages: int, seconds: float) -> Line:
    """Return a line with the rate at which a system's bytes were seen to travel on it.

    Headers, acknowledgements and the transport's caution leave less than the nominal rate.

    Args:
        line: the nominal one.
        sent_bytes: that a worker sent in a step with hardly any arithmetic.
        messages: that it sent one after the other; each takes the line's delay.
        seconds: of such a step.
    """
    travelling = max(seconds - messages * line.delay_seconds, 1e-9)
    megabits = min(line.up_megabits, sent_bytes * BITS_PER_BYTE / MEGABIT / travelling)
    return Line(f"{line.name}, as observed", megabits, megabits, line.round_trip_seconds)


def pipeline_ratio(
    machines: int, shape: Shape, element_bytes: float, bits_per_second: float
) -> float:
    """Return how many times the tokens per second of a pipeline swapped full copies train.

    Both need 8·N FLOP a token with recomputation. A pipeline makes min(K·F/8N, r/8bd), full copies
    make K·F/8N, so the ratio is max(1, (K·F/8N) / (r/8bd)).

    Args:
        machines: K.
        shape: the named model.
        element_bytes: b.
        bits_per_second: r.
    """
    compute = machines * RTX_3090_FLOPS / (8 * shape.parameters)
    boundary = bits_per_second / (8 * element_bytes * shape.width)
    return max(1.0, compute / boundary)


def boundary_seconds(step_tokens: int, width: int, element_bytes: float, line: Line) -> float:
    """Return how long a step's activations and gradients travel over a boundary of a pipeline.

    GPipe sends all activations before any gradient, so the two add up: 2·T·d·b / r.

    Args:
        step_tokens: T.
        width: d of the model that is trained here.
        element_bytes: b.
        line: of a worker, as scaled.
    """
    return 2 * step_tokens * width * element_bytes / line.up_bytes


def _compute_ratio(cpu_flops: float) -> float:
    if not (cpu_flops > 0 and math.isfinite(cpu_flops)):
        raise LinkError(
            f"this machine's rate was measured as {cpu_flops:g} FLOP/s, so no line can be scaled "
            "to it; run the benchmark again on a machine that is less busy"
        )
    return cpu_flops / RTX_3090_FLOPS


def _multiply(line: Line, factor: float) -> Line:
    return Line(
        f"{line.name}, scaled",
        line.up_megabits * factor,
        line.down_megabits * factor,
        line.round_trip_seconds,
    )
