"""What the study trains: a byte-level GPT on the standard library's source, in one flat buffer. 0.63 M parameters, or
32 M on a GPU where there is one, if the environment has BARNRAISE_STUDY=large."""

import os
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from blake3 import blake3
from torch import Tensor

from barnraise.durable_io import write_atomically
from barnraise.exchange.ledger.anchor import initial_weights
from barnraise.models import gpt2 as gpt
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.spec import ModelSpec, Recipe, TextSpec
from barnraise.swap.adamw import AdamWKernel, AdamWStep
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.text import shards
from barnraise.text.batches import TokenDataset
from barnraise.text.sources import read_stdlib


@dataclass(frozen=True)
class Scale:
    """What a study trains, and how many sequences a replica's step has."""

    model: ModelSpec
    sequences: int
    device: str = "cpu"


LARGE = (
    "cuda" if torch.cuda.is_available() else "cpu"
)  # where there is no GPU it takes days, and runs
SCALES = {
    "small": Scale(ModelSpec(layers=3, width=128, heads=4, context=64, vocabulary=256), 8),
    "large": Scale(
        ModelSpec(layers=10, width=512, heads=8, context=256, vocabulary=256), 16, LARGE
    ),
}
NAME = os.environ.get("BARNRAISE_STUDY", "small")
MODEL, SEQUENCES, DEVICE = (
    getattr(SCALES[NAME], part) for part in ("model", "sequences", "device")
)
STEP_TOKENS = SEQUENCES * MODEL.context
FRAGMENTS = MODEL.fragments()
ENDS = [0, *accumulate(fragment.size for fragment in FRAGMENTS)]
PIECES = [slice(begin, end) for begin, end in pairwise(ENDS)]
SIZE = ENDS[-1]
CLIP, DECAY, WARM_UP = 1.0, 0.1, 20
FOLDER = Path(__file__).resolve().parents[2] / "build" / "study"
RUN = "01890000-0000-7000-8000-000000000001"


def initial_units(seed: int) -> Tensor:
    """int32 [SIZE]: the anchor at the start."""
    return torch.cat([initial_weights(fragment, seed) for fragment in FRAGMENTS]).to(DEVICE)


def nothing(dtype: torch.dtype = torch.float32) -> Tensor:
    """[SIZE] of zeros."""
    return torch.zeros(SIZE, dtype=dtype, device=DEVICE)


def prepare_text() -> None:
    """Once: shards and their manifest under build/study."""
    FOLDER.mkdir(parents=True, exist_ok=True)

    def put(blob: bytes) -> str:
        name = blake3(blob).hexdigest()
        if not (
            FOLDER / name
        ).exists():  # a training beside this one reads it as memory: cut short it would be its end
            write_atomically(FOLDER / name, blob)
        return name

    manifest = shards.prepare_text(
        TextSpec(tokenizer="bytes"), MODEL.vocabulary, RUN, put, list(read_stdlib())
    )
    write_atomically(FOLDER / "manifest.json", manifest.model_dump_json().encode())


@cache
def text() -> TokenDataset:
    manifest = TextManifest.model_validate_json((FOLDER / "manifest.json").read_text())
    return TokenDataset(manifest, lambda digest: FOLDER / digest)


def batch(seed: int, replica: int, step: int) -> Tensor:
    """int64 [SEQUENCES, context + 1]: the same whatever the kind of training."""
    return text().sample_batch(seed, str(replica), step, SEQUENCES, MODEL.context)


def rate_scale(tokens: float, budget: int) -> float:
    """A cosine after a twentieth of warm-up."""
    return learning_rate_scale(Recipe(token_budget=budget, warmup_tokens=budget // 20), int(tokens))


class Replica:
    """Weights, their gradient, and the inner optimizer's moments: fp32 [SIZE] each."""

    def __init__(self, optimizer: str = "adamw"):
        self.flat, self.gradient, self.m, self.v = (nothing() for _ in range(4))
        self.optimizer, self.steps, self.warming = optimizer, 0, 0
        self._weights = [_leaves(i, self.flat, self.gradient) for i in range(len(FRAGMENTS))]

    def learn(self, tokens: Tensor) -> float:
        """The gradient of a batch, clipped; its loss."""
        self.gradient.zero_()
        found = _loss(self._weights, tokens)
        found.backward()
        self.gradient.div_(max(1.0, float(self.gradient.norm()) / CLIP))
        return found.item()

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """With the gradient there is. A replica that is `warming` comes to its rate over WARM_UP steps."""
        self.steps += 1
        rate *= 1 - self.warming / (WARM_UP + 1)
        self.warming = max(0, self.warming - 1)
        for fragment, piece in zip(FRAGMENTS, PIECES, strict=True):
            parts = [buffer[piece] for buffer in (self.flat, self.gradient, self.m, self.v)]
            if self.optimizer == "muon" and fragment.name.startswith("block"):
                _muon(fragment, *parts[:3], rate)
            else:
                step = AdamWStep(fragment, self.steps, rate, DECAY)
                AdamWKernel.prepare(step, 0, parts[0]).apply(0, *parts)

    @torch.no_grad()
    def validate(self, flat: Tensor, sequences: int) -> float:
        """The loss of other weights, the same windows each time. Leaves the replica's own as they are."""
        own, self.flat[:] = self.flat.clone(), flat
        losses = [_loss(self._weights, tokens).item() for tokens in _held_out(sequences)]
        self.flat[:] = own
        return sum(losses) / len(losses)


@cache
def _held_out(sequences: int) -> list[Tensor]:
    return text().validation_batches(sequences, MODEL.context, batch_sequences=64)


def _leaves(i: int, flat: Tensor, gradient: Tensor) -> gpt.Weights:
    """A fragment's tensors, in `flat`, whose gradients come to lie in `gradient`."""
    found = {}
    gradients = gpt.views(FRAGMENTS[i], gradient[PIECES[i]])
    for name, view in gpt.views(FRAGMENTS[i], flat[PIECES[i]]).items():
        found[name] = view.detach().requires_grad_()
        found[name].grad = gradients[name]
    return found


def _loss(weights: list[gpt.Weights], tokens: Tensor) -> Tensor:
    tokens = tokens.to(DEVICE)
    x = gpt.embed(weights[0], tokens[:, :-1])
    for block in weights[1:-1]:
        x = gpt.block(block, x, MODEL.heads)
    return F.cross_entropy(
        gpt.head(weights[-1], weights[0], x).flatten(0, 1), tokens[:, 1:].flatten()
    )


def _muon(fragment, flat: Tensor, gradient: Tensor, m: Tensor, rate: float) -> None:
    """Muon (Jordan et al. 2024) of a block's matrices, with the scale of Liu et al. 2025 (so that AdamW's rates fit);
    norms and biases go by the sign of their momentum."""
    m.mul_(0.95).add_(gradient)
    nesterov = gradient.add(m, alpha=0.95)
    for slot in fragment.slots:
        at = slice(slot.offset, slot.offset + slot.size)
        if len(slot.shape) < 2:
            flat[at].sub_(nesterov[at].sign(), alpha=0.2 * rate)
            continue
        matrix = nesterov[at].view(slot.shape)
        wide = matrix if slot.shape[0] <= slot.shape[1] else matrix.T
        x = wide / (wide.norm() + 1e-7)
        for _ in range(5):
            square = x @ x.T
            x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
        x = x if slot.shape[0] <= slot.shape[1] else x.T
        flat[at].mul_(1 - rate * DECAY).sub_(
            x.reshape(-1), alpha=0.2 * rate * max(slot.shape) ** 0.5
        )
