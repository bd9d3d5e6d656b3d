"""Quantisation schemes: how many values of an update are sent, and in how many bits. Pure.

Everything is a closed formula; the module does not import torch.
"""

from dataclasses import dataclass

from barnraise.spec import CODEC

CHUNK = 4096  # elements that share their levels
POSITION_BITS = 12  # of a position within a chunk
PAYLOAD_HEADER_BYTES = 12  # of a payload
BITS = (2, 4, 8)


@dataclass(frozen=True)
class QuantizationScheme:
    """A format for the updates of a fragment, named `dense8`, `top64x2` and the like.

    Attributes:
        kept: How many values of each chunk of 4096 are sent, those of the largest magnitude. With
            all 4096 the scheme is dense and sends no positions.
        bits: The bits of each value: 2, 4 or 8.

    Raises:
        ValueError: If there is no such scheme.
    """

    kept: int
    bits: int

    def __post_init__(self) -> None:
        if not (1 <= self.kept <= CHUNK and self.bits in BITS):
            raise ValueError(f"no codec sends {self.kept} values of each chunk in {self.bits} bits")

    @classmethod
    def parse(cls, name: str) -> "QuantizationScheme":
        """Return the scheme of a name such as `dense8` or `top64x2`.

        Raises:
            ValueError: If there is no such scheme.
        """
        match = CODEC.fullmatch(name)
        if match is None:
            raise ValueError(
                "this version has the codecs dense8, dense4, dense2 and top64x2 (…);"
                f" there is no '{name}'"
            )
        if match["dense"]:
            return cls(CHUNK, int(match["dense"]))
        return cls(int(match["kept"]), int(match["bits"]))

    def __str__(self) -> str:
        return f"dense{self.bits}" if self.dense else f"top{self.kept}x{self.bits}"

    @property
    def dense(self) -> bool:
        """Return whether every value is sent."""
        return self.kept == CHUNK

    @property
    def levels_per_chunk(self) -> int:
        """Return the levels (uint32) of a chunk: two magnitudes with 2 bits, else one step size."""
        return 2 if self.bits == 2 else 1

    @property
    def bits_per_parameter(self) -> float:
        """Return the bits per parameter of a long fragment, whose header is negligible."""
        bits_per_value = self.bits if self.dense else self.bits + POSITION_BITS
        return (32 * self.levels_per_chunk + self.kept * bits_per_value) / CHUNK

    def values_sent(self, n: int) -> int:
        """Return how many of n elements are sent; a short last chunk sends its share."""
        chunks, rest = divmod(n, CHUNK)
        return chunks * self.kept + -(-rest * self.kept // CHUNK)

    def section_sizes(self, n: int) -> tuple[int, int, int]:
        """Return the bytes of the levels, the positions and the values of n elements."""
        sent = self.values_sent(n)
        levels = 4 * self.levels_per_chunk * -(-n // CHUNK)
        positions = 0 if self.dense else -(-sent * POSITION_BITS // 8)
        values = -(-sent * self.bits // 8)
        return levels, positions, values

    def payload_size(self, n: int) -> int:
        """Return the bytes of a payload of n elements, header included."""
        return PAYLOAD_HEADER_BYTES + sum(self.section_sizes(n))

    def smallest_for(self, n: int) -> "QuantizationScheme":
        """Return this scheme, or a dense one with at least as many bits that is not larger.

        A position costs 12 bits, so that sending many of a few values takes more bytes than sending
        all of them.
        """
        dense = [QuantizationScheme(CHUNK, bits) for bits in reversed(BITS) if bits >= self.bits]
        return min([*dense, self], key=lambda scheme: scheme.payload_size(n))
