"""AdamW's rate over what memory streams: `python benchmarks/swap/adamw.py`.

Bytes are counted as an update reads and writes them: 28 a parameter in fp32 (weights 8, gradient 4, m and v 16) and in
halves (4 + 4 of weights), 16 in bytes (8 of weights, 4 of gradient, 4 of moments). The stream is STREAM's triad, 12 an
element, torch's own or by tiles as the updates go, whichever is quicker: a busy machine slows the two unequally. All
take turns, on all threads, over blocks of GPT-2 355M laid out as they come: buffers a power of two apart would halve
AdamW's rate. Prints a table, then one JSON object. Leave the machine alone meanwhile.
"""

import argparse
import json
import time
from collections.abc import Callable
from statistics import median

import torch

from barnraise.spec import Fragment, preset
from barnraise.swap.adamw import AdamWStep, adamw_update
from barnraise.swap.precision import Moments8, encode_moments, split, update_8bit, update_split
from barnraise.swap.tile_threads import BLOCK, for_each_tile

TRIAD, TILED, FP32, HALVES, BYTES = "triad", "triad by tiles", "fp32", "halves", "8-bit"
MOVED = {TRIAD: 12, TILED: 12, FP32: 28, HALVES: 28, BYTES: 16}  # bytes a parameter


class Block:
    """One block's state in every form."""

    def __init__(self, fragment: Fragment):
        self.fragment, n = fragment, fragment.size
        self.weights, self.gradient, self.m = (torch.randn(n) * 0.02 for _ in range(3))
        self.v = torch.rand(n) * 1e-3
        self.step = AdamWStep(fragment, number=100, learning_rate=1e-4, weight_decay=0.1)
        self.halves = split(self.weights)
        blocks = -(-n // BLOCK)
        coded = (torch.zeros(n, dtype=torch.uint8) for _ in range(2))
        self.moments = Moments8(*coded, *(torch.zeros(blocks) for _ in range(2)))
        encode_moments(self.m, self.v, self.moments)

    def kinds(self) -> dict[str, Callable[[], object]]:
        step, g, m, v = self.step, self.gradient, self.m, self.v
        return {
            TRIAD: lambda: triad(None, 0, m, v, self.weights),
            TILED: lambda: for_each_tile(triad, m, v, self.weights),
            FP32: lambda: adamw_update(step, 0, self.weights, g, m, v),
            HALVES: lambda: update_split(step, 0, self.halves, g, m, v),
            BYTES: lambda: update_8bit(step, 0, self.weights, g, self.moments),
        }


def triad(_: object, __: int, b: torch.Tensor, c: torch.Tensor, a: torch.Tensor) -> None:
    torch.add(b, c, alpha=3.0, out=a)


def measure(turns: int = 25, blocks: int = 4) -> dict[str, float]:
    """Each form's rate over the quicker triad's, medians of `turns` side by side, and that triad's in GB/s."""
    fragment = preset("gpt2-355m").fragments()[1]
    todo = [Block(fragment).kinds() for _ in range(blocks)]  # 200 MB each: beyond caches
    seconds: dict[str, list[float]] = {kind: [] for kind in MOVED}
    for turn in range(turns + 1):
        for kind, found in seconds.items():
            begun = time.perf_counter()
            for block in todo:
                block[kind]()
            if turn:  # the first finds threads and pages
                found.append(time.perf_counter() - begun)
    n = fragment.size * blocks
    rates = {kind: n * MOVED[kind] / median(found) / 1e9 for kind, found in seconds.items()}
    stream = max(rates[TRIAD], rates[TILED])
    of = {kind: round(rate / stream, 4) for kind, rate in rates.items()}
    for kind, rate in rates.items():
        million = rate * 1e3 / MOVED[kind]
        print(
            f"  {kind:14} {rate:6.1f} GB/s  {million:7,.0f} M elements/s  {of[kind]:5.2f} of the stream",
            flush=True,
        )
    return {
        "of_stream": of[FP32], "of_stream_split": of[HALVES], "of_stream_8bit": of[BYTES],
        "stream_gb_s": round(stream, 2),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="AdamW's rate over what memory streams.")
    parser.add_argument("--turns", type=int, default=25)
    turns = parser.parse_args().turns
    print(f"AdamW, {torch.get_num_threads()} threads, medians of {turns}")
    print(json.dumps({"adam": measure(turns)}))


if __name__ == "__main__":
    main()
