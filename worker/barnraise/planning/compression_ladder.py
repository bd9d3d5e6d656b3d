"""The compression schemes that suit an uplink, by how long rounds are with each."""

from dataclasses import dataclass

from barnraise.planning.quantization_scheme import QuantizationScheme


@dataclass(frozen=True)
class CompressionLevel:
    """A compression scheme and the round lengths that suit it.

    Attributes:
        scheme: How updates are compressed.
        min_steps: The shortest round that it is used for.
        max_steps: The longest round that it is used for.
    """

    scheme: QuantizationScheme
    min_steps: int
    max_steps: int


COMPRESSION_LADDER = (
    CompressionLevel(QuantizationScheme.parse("dense2"), 10, 23),
    CompressionLevel(QuantizationScheme.parse("top256x2"), 10, 23),
    CompressionLevel(QuantizationScheme.parse("top64x2"), 5, 15),
    CompressionLevel(QuantizationScheme.parse("dense2"), 128, 10_000),
)  # in descending order of the bits that a parameter costs in a step
LONG_ROUNDS = COMPRESSION_LADDER[-1]
DEFAULT_SCHEME = COMPRESSION_LADDER[0].scheme  # while the uplink is not measured yet
# The longest round after which what a sparse update leaves out is carried into the next one.
MAX_CARRY_STEPS = max(level.max_steps for level in COMPRESSION_LADDER if level is not LONG_ROUNDS)
# From all values to the fewest.
SCHEMES = sorted(
    {level.scheme for level in COMPRESSION_LADDER},
    key=lambda scheme: scheme.bits_per_parameter,
    reverse=True,
)
