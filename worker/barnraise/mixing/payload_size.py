"""How many bytes weights and activations take in 32, 16 or 8 bits. Pure."""

from barnraise.planning.quantization_scheme import CHUNK

SCALE_BYTES = 4  # of each chunk's scale, in 8 bits


def payload_size(count: int, bits: int) -> int:
    """Return the bytes of so many weights in 32, 16 or 8 bits."""
    scales = SCALE_BYTES * -(-count // CHUNK) if bits == 8 else 0
    return scales + count * bits // 8
