"""What boundaries in 8 bits, and several holders of a span, cost in loss.

For 8 bits no channel is needed: the activations of one machine pass through the crew's encoding
wherever a crew with a block a machine has a boundary. Holders are threads of this process.
"""

import sysconfig
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from helpers.worker.crews import LocalCrew, deal
from helpers.worker.plans import bitwise
from torch import Tensor

from barnraise.ledger.anchor import initial_weights
from barnraise.mixing.payloads import decode_weights, encode_weights
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.spec import ModelSpec
from barnraise.swap.activations import Activations
from barnraise.swap.engine import Engine
from barnraise.swap.state_store import FragmentSequence, StateStore
from barnraise.training.crew.crew_engine import CrewEngine
from barnraise.training.training_engine import Encoder

MODEL = ModelSpec(layers=4, width=64, heads=4, context=64, vocabulary=256)
SEQUENCES = 2  # of a micro-batch
MICRO_BATCHES = 8
ROUND_STEPS = 20
WARMUP_STEPS = 50
VALIDATION_BATCHES = 256
TEXT_BYTES = 8 << 20
PLAN = replace(bitwise.resident_plan(MODEL), sequences=SEQUENCES, micro_batches=MICRO_BATCHES)
ENCODE = Encoder(QuantizationScheme.parse("dense8"))


class EncodedActivations(Activations):
    """Activations that are encoded and decoded at each boundary."""

    def __init__(self, bits: int) -> None:
        """Encode in so many bits."""
        super().__init__()
        self._bits = bits

    def send(self, i: int, m: int, x: Tensor) -> None:
        """Pass on what another machine of a crew would receive."""
        if abs(i) > 1:
            values = x.detach().reshape(-1)
            payload = encode_weights(values, self._bits)
            x = decode_weights(payload, values.numel(), self._bits).view_as(x)
        super().send(i, m, x)


class EncodedEngine(Engine):
    """An engine whose activations are encoded."""

    bits = 32

    def _open_activations(self, device: int) -> Activations:
        return EncodedActivations(self.bits)


@cache
def read_text() -> Tensor:
    """Return the source of Python's standard library, uint8 [n]."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    data = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    return torch.frombuffer(bytearray(data[:TEXT_BYTES]), dtype=torch.uint8)


def draw_batch(text: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random micro-batch, int64 [sequences, context + 1]."""
    first = torch.randint(len(text) - MODEL.context, (SEQUENCES, 1), generator=generator)
    return text[first + torch.arange(MODEL.context + 1)].long()


def train_engine(engine: Engine | CrewEngine, seed: int, steps: int, is_alone: bool) -> None:
    """Train on random parts of the text that are not held out; crews publish rounds."""
    text = read_text()
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        batches = [draw_batch(text[len(text) // 20 :], generator) for _ in range(MICRO_BATCHES)]
        engine.step(batches, min(1.0, (step + 1) / WARMUP_STEPS), position=step + 1)
        if not is_alone and (step + 1) % ROUND_STEPS == 0:
            list(engine.end_round(ENCODE, 1.0))


def draw_held_out() -> list[Tensor]:
    """Return micro-batches of the text that is held out, always the same."""
    text = read_text()
    generator = torch.Generator().manual_seed(1)
    return [draw_batch(text[: len(text) // 20], generator) for _ in range(VALIDATION_BATCHES)]


def measure_loss(bits: int, seed: int, steps: int) -> float:
    """Return the loss on held-out text after training with boundaries in so many bits."""
    store = StateStore(PLAN)
    anchor = FragmentSequence(store, "anchor")
    for fragment in PLAN.fragments:
        anchor[fragment.index] = initial_weights(fragment, seed)
    engine = EncodedEngine(PLAN, bitwise.RECIPE, store, bitwise.HeaderRecorder())
    engine.bits = bits
    train_engine(engine, seed, steps, is_alone=True)
    engine.bits = 32
    loss = engine.step(draw_held_out(), 0.0).loss  # of the replica; the engine ends here
    engine.close()
    return loss


def measure_holders(holders: int, seed: int, steps: int) -> float:
    """Return the anchor's loss on held-out text after a crew's training."""
    roster = deal(PLAN, (1, MODEL.layers - 1), holders=(1, holders))
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCrew([PLAN] * (1 + holders), roster, Path(folder)) as crew,
    ):
        engine = crew.start([initial_weights(each, seed) for each in PLAN.fragments])
        train_engine(engine, seed, steps, is_alone=False)
        return engine.evaluate(draw_held_out())


def _compare(
    measure: Callable[[int, int, int], float], values: tuple[int, int], seeds: int, steps: int
) -> float:
    """Return by which part the mean loss with one value is above that with another one."""
    losses: list[list[float]] = []
    for seed in range(seeds):
        losses.append([measure(value, seed, steps) for value in values])
        print(f"  seed {seed}: {losses[-1]} with {values}", flush=True)
    first, second = (sum(column) for column in zip(*losses, strict=True))
    return second / first - 1


def compare_losses(seeds: int, steps: int) -> float:
    """Return by which part the mean loss with 8 bits is above that with 32."""
    return _compare(measure_loss, (32, 8), seeds, steps)


def compare_holders(seeds: int, steps: int) -> float:
    """Return by which part the mean loss with two holders of a span is above that with one."""
    return _compare(measure_holders, (1, 2), seeds, steps)
