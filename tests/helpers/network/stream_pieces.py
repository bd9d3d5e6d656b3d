"""Split a stream of bytes as a network might."""

import itertools
from collections.abc import Iterator, Sequence


def split_stream(stream: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield all of a stream in pieces of these sizes, which repeat."""
    offset = 0
    for size in itertools.cycle(sizes):
        if offset >= len(stream):
            return
        yield stream[offset : offset + size]
        offset += size
