"""The compression schemes that suit an uplink and a run, by how long and how many rounds are."""

from dataclasses import dataclass

from barnraise.planning.quantization_scheme import QuantizationScheme


@dataclass(frozen=True)
class CompressionLevel:
    """A compression scheme, and the round lengths and runs that suit it.

    Attributes:
        scheme: How updates are compressed.
        min_steps: The shortest round that it is used for.
        max_steps: The longest round that it is used for.
        min_rounds: The fewest such rounds of a machine in the whole run that it is used for.
    """

    scheme: QuantizationScheme
    min_steps: int
    max_steps: int
    min_rounds: int = 0


# Updates of one value in 64 have then sent each value one and a half times.
MIN_SPARSE_ROUNDS = 96
COMPRESSION_LADDER = (
    CompressionLevel(QuantizationScheme.parse("dense2"), 10, 23),
    CompressionLevel(QuantizationScheme.parse("top256x2"), 10, 23),
    CompressionLevel(QuantizationScheme.parse("top64x2"), 5, 15),
    # With so many long rounds of all values, nothing needs to be left out.
    CompressionLevel(QuantizationScheme.parse("dense2"), 128, 10_000, min_rounds=400),
    CompressionLevel(QuantizationScheme.parse("top64x2"), 16, 10_000, MIN_SPARSE_ROUNDS),
    CompressionLevel(QuantizationScheme.parse("dense2"), 128, 10_000),
)  # the slower the link, the further down
SPARSE_ROUNDS, LONG_ROUNDS = COMPRESSION_LADDER[-2:]
DEFAULT_SCHEME = COMPRESSION_LADDER[0].scheme  # while the uplink is not measured yet
# What a sparse update leaves out is carried into the next round where a machine has so many of
# them in the whole run. Of one value in 64, that gains 6 % with 50 rounds and costs 0.6 % with 25.
MIN_CARRY_ROUNDS = 32
# From all values to the fewest.
SCHEMES = sorted(
    {level.scheme for level in COMPRESSION_LADDER},
    key=lambda scheme: scheme.bits_per_parameter,
    reverse=True,
)
