"""Measure AdamW's rate against the memory bandwidth: `python benchmarks/swap/adamw.py`.

The bytes of an update are those that it reads and writes for each parameter:

    fp32           28: weights 8, gradient 4, moments 16
    split weights  28: the same, with each weight in two halves of 16 bits
    8-bit moments  16: weights 8, gradient 4, moments 4

The bandwidth is that of STREAM's triad, 12 bytes an element, run by torch or tile by tile as the
updates run, whichever is quicker: a busy machine slows the two by different factors. All forms take
turns, on all threads, over blocks of GPT-2 355M. The buffers lie where the allocator puts them:
buffers a power of two apart would halve AdamW's rate. The script prints a table and then one JSON
object. Leave the machine alone meanwhile.
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

TRIAD = "triad"
TILED_TRIAD = "triad by tiles"
FP32 = "fp32"
SPLIT = "split weights"
EIGHT_BIT = "8-bit moments"
BYTES_PER_PARAMETER = {TRIAD: 12, TILED_TRIAD: 12, FP32: 28, SPLIT: 28, EIGHT_BIT: 16}


class BlockState:
    """One block's weights, gradient and moments in every form."""

    def __init__(self, fragment: Fragment) -> None:
        """Fill the state with random values.

        Args:
            fragment: the block whose size and slots the state has.
        """
        size = fragment.size
        self.weights, self.gradient, self.m = (torch.randn(size) * 0.02 for _ in range(3))
        self.v = torch.rand(size) * 1e-3
        self.step = AdamWStep(fragment, number=100, learning_rate=1e-4, weight_decay=0.1)
        self.halves = split(self.weights)
        scales_count = -(-size // BLOCK)
        self.moments = Moments8(
            torch.zeros(size, dtype=torch.uint8),
            torch.zeros(size, dtype=torch.uint8),
            torch.zeros(scales_count),
            torch.zeros(scales_count),
        )
        encode_moments(self.m, self.v, self.moments)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return one call for each form, which updates the block once."""
        step, gradient, m, v = self.step, self.gradient, self.m, self.v
        return {
            TRIAD: lambda: run_triad(None, 0, m, v, self.weights),
            TILED_TRIAD: lambda: for_each_tile(run_triad, m, v, self.weights),
            FP32: lambda: adamw_update(step, 0, self.weights, gradient, m, v),
            SPLIT: lambda: update_split(step, 0, self.halves, gradient, m, v),
            EIGHT_BIT: lambda: update_8bit(step, 0, self.weights, gradient, self.moments),
        }


def run_triad(
    _scratch: object, _offset: int, b: torch.Tensor, c: torch.Tensor, a: torch.Tensor
) -> None:
    """Compute a ← b + 3 c, with the signature of an update of one tile."""
    torch.add(b, c, alpha=3.0, out=a)


def measure(rounds: int = 25, blocks: int = 4) -> dict[str, float]:
    """Measure each form's rate over that of the quicker triad.

    Args:
        rounds: how many times all forms take turns; the rates are medians.
        blocks: blocks of GPT-2 355M, 200 MB each, so that no cache holds them.

    Returns:
        Rates as fractions of the stream, and the stream in GB/s.
    """
    fragment = preset("gpt2-355m").fragments()[1]
    calls_by_block = [BlockState(fragment).calls() for _ in range(blocks)]
    seconds: dict[str, list[float]] = {form: [] for form in BYTES_PER_PARAMETER}
    for round_number in range(rounds + 1):
        for form, form_seconds in seconds.items():
            started = time.perf_counter()
            for calls in calls_by_block:
                calls[form]()
            if round_number:  # The first round starts threads and maps pages.
                form_seconds.append(time.perf_counter() - started)

    parameters = fragment.size * blocks
    rates = {
        form: parameters * BYTES_PER_PARAMETER[form] / median(form_seconds) / 1e9
        for form, form_seconds in seconds.items()
    }
    stream = max(rates[TRIAD], rates[TILED_TRIAD])
    fractions = {form: round(rate / stream, 4) for form, rate in rates.items()}
    for form, rate in rates.items():
        million_elements = rate * 1e3 / BYTES_PER_PARAMETER[form]
        print(
            f"  {form:14} {rate:6.1f} GB/s  {million_elements:7,.0f} M elements/s"
            f"  {fractions[form]:5.2f} of the stream",
            flush=True,
        )
    return {
        "of_stream": fractions[FP32],
        "of_stream_split": fractions[SPLIT],
        "of_stream_8bit": fractions[EIGHT_BIT],
        "stream_gb_s": round(stream, 2),
    }


def main() -> None:
    """Measure and print a table and one JSON object."""
    parser = argparse.ArgumentParser(description="AdamW's rate over the memory bandwidth.")
    parser.add_argument("--turns", type=int, default=25, help="how many times the forms take turns")
    rounds = parser.parse_args().turns
    print(f"AdamW, {torch.get_num_threads()} threads, medians of {rounds}")
    print(json.dumps({"adam": measure(rounds)}))


if __name__ == "__main__":
    main()
