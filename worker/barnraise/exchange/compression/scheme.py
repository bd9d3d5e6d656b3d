"""How thin an update is said: how many values of each chunk, and in how many bits. Closed forms, no torch."""

from dataclasses import dataclass

from barnraise.spec import CODEC

CHUNK = 4096  # elements that share their levels; a position in one takes 12 bits
POSITION = 12
HEADER_BYTES = 12
BITS = (2, 4, 8)


@dataclass(frozen=True)
class Form:
    """`kept` values of each chunk of 4096, the largest, in `bits` bits each: 2, 4 or 8. All 4096: dense, without
    positions. Named `dense8`, `top64x2`… Raises ValueError for a form there is none of."""

    kept: int
    bits: int

    def __post_init__(self) -> None:
        if not (1 <= self.kept <= CHUNK and self.bits in BITS):
            raise ValueError(f"there is no form of {self.kept} values a chunk in {self.bits} bits")

    @classmethod
    def parse(cls, name: str) -> "Form":
        if not (found := CODEC.fullmatch(name)):
            raise ValueError(
                f"this version has the codecs dense8, dense4, dense2 and top64x2 (…); there is no '{name}'"
            )
        kept, bits, dense = found["kept"], found["bits"], found["dense"]
        return cls(CHUNK, int(dense)) if dense else cls(int(kept), int(bits))

    def __str__(self) -> str:
        return f"dense{self.bits}" if self.dense else f"top{self.kept}x{self.bits}"

    @property
    def dense(self) -> bool:
        return self.kept == CHUNK

    @property
    def levels(self) -> int:
        """Levels (uint32) a chunk: two magnitudes at 2 bits, else the one that values are multiples of."""
        return 2 if self.bits == 2 else 1

    @property
    def bits_a_parameter(self) -> float:
        """Of a long fragment: what its header adds is nothing by then."""
        return (
            32 * self.levels + self.kept * (self.bits + (0 if self.dense else POSITION))
        ) / CHUNK

    def kept_of(self, n: int) -> int:
        """How many of n elements are said: a last chunk that is short keeps its share, rounded up."""
        whole, rest = divmod(n, CHUNK)
        return whole * self.kept + -(-rest * self.kept // CHUNK)

    def parts(self, n: int) -> tuple[int, int, int]:
        """Bytes of the levels, the positions and the values in a payload of n elements."""
        kept = self.kept_of(n)
        positions = 0 if self.dense else -(-kept * POSITION // 8)
        return 4 * self.levels * -(-n // CHUNK), positions, -(-kept * self.bits // 8)

    def size(self, n: int) -> int:
        """Bytes of a payload of n elements, header included."""
        return HEADER_BYTES + sum(self.parts(n))

    def fitted(self, n: int) -> "Form":
        """This form, or a dense one of as many bits or more that takes no more bytes for n elements: positions cost 12
        bits each, so that keeping many of few costs more than keeping all."""
        dense = [Form(CHUNK, bits) for bits in reversed(BITS) if bits >= self.bits]
        return min([*dense, self], key=lambda form: form.size(n))
