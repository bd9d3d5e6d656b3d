"""State what ranks that share one model cannot train, each in a sentence. Pure."""

from barnraise.planning.limits import Limits
from barnraise.spec import ModelSpec

USE_SWAP = "use --engine swap"
NO_AVERAGES = (
    "machines of a run with decentralised Adam average their weights in every step, which sharded "
    f"ranks do not: {USE_SWAP}"
)


def explain_split(model: ModelSpec, tensor: int) -> str:
    """Return why a block cannot be split among so many tensor-parallel ranks; "" if it can."""
    counts = {
        "heads": model.heads,
        "key-value heads": model.grouped_heads,
        "hidden values of the feed-forward": model.hidden_width,
    }
    for name, count in counts.items():
        if count % tensor:
            fitting = [n for n in range(2, tensor) if not any(c % n for c in counts.values())]
            hint = f"--tensor {fitting[-1]} divides them" if fitting else "leave out --tensor"
            return f"{tensor} ranks cannot share {count} {name} evenly: {hint}"
    return ""


def explain_ranks(
    model: ModelSpec, limits: Limits, step_sequences: int, ranks: int, tensor: int
) -> str:
    """Return why so many ranks cannot share a model under an owner's limits; "" if they can."""
    if ranks % tensor:
        return f"{ranks} ranks cannot form groups of {tensor}: choose a --tensor that divides them"
    if step_sequences % (ranks // tensor):
        return (
            f"{ranks // tensor} ranks cannot share {step_sequences} sequences a step evenly: "
            f"{USE_SWAP}"
        )
    if limits.moments_bits != 32:
        return f"ranks have moments of 32 bits: leave out --moments-8bit, or {USE_SWAP}"
    if limits.clipping not in ("auto", "exact"):
        return f"ranks clip by the whole gradient's norm: leave out --clipping, or {USE_SWAP}"
    return explain_split(model, tensor)
