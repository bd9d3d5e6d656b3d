"""The model and text of the study: a byte-level GPT on the standard library's source.

All parameters lie in one flat buffer. There are 0.63 M of them; 4 M if the environment has
BARNRAISE_STUDY=medium; or 32 M, on a GPU where there is one, with BARNRAISE_STUDY=large; or 0.12 M,
for trainings of a minute, with BARNRAISE_STUDY=mini.
"""

import os
import sys
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from blake3 import blake3
from study_case import Case
from torch import Tensor

from barnraise.durable_io import write_atomically
from barnraise.ledger.anchor import initial_weights
from barnraise.models.functions import FUNCTIONS, head
from barnraise.models.weights import Weights, views
from barnraise.planning.tile_layout import lay_out_tiles
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.spec import MATRIX_RATE_RATIO, MUON, ModelSpec, Recipe, TextSpec
from barnraise.swap.adamw import AdamWKernel, AdamWStep
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.swap.muon_moments import MuonMoments
from barnraise.text.batches import TokenDataset
from barnraise.text.stdlib_text import read_stdlib

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from sharded_documents import shard_documents

GPT2 = FUNCTIONS["gpt2"]


@dataclass(frozen=True)
class Scale:
    """What a study trains, and how many sequences a replica's step has."""

    model: ModelSpec
    sequences: int
    device: str = "cpu"


# Without a GPU the large study takes days, but it runs.
LARGE_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCALES = {
    "mini": Scale(ModelSpec(layers=2, width=64, heads=2, context=64, vocabulary=256), 4),
    "small": Scale(ModelSpec(layers=3, width=128, heads=4, context=64, vocabulary=256), 8),
    "medium": Scale(ModelSpec(layers=5, width=256, heads=4, context=128, vocabulary=256), 8),
    "large": Scale(
        ModelSpec(layers=10, width=512, heads=8, context=256, vocabulary=256), 16, LARGE_DEVICE
    ),
}
NAME = os.environ.get("BARNRAISE_STUDY", "small")
MODEL = SCALES[NAME].model
SEQUENCES = SCALES[NAME].sequences
DEVICE = SCALES[NAME].device
STEP_TOKENS = SEQUENCES * MODEL.context  # of one replica
FRAGMENTS = MODEL.fragments()
ENDS = [0, *accumulate(fragment.size for fragment in FRAGMENTS)]
SLICES = [slice(begin, end) for begin, end in pairwise(ENDS)]  # of each fragment in the flat buffer
SIZE = ENDS[-1]  # parameters
CLIP_NORM = 1.0
WARMUP_STEPS = 20  # of a replica that joined late
FOLDER = Path(__file__).resolve().parents[2] / "build" / "study"
RUN = "01890000-0000-7000-8000-000000000001"


def initial_units(seed: int) -> Tensor:
    """Return the initial anchor, int32 [SIZE]."""
    return torch.cat([initial_weights(fragment, seed) for fragment in FRAGMENTS]).to(DEVICE)


def zeros(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return zeros, [SIZE]."""
    return torch.zeros(SIZE, dtype=dtype, device=DEVICE)


def prepare_text() -> None:
    """Write the text's shards and their manifest under build/study."""
    FOLDER.mkdir(parents=True, exist_ok=True)

    def store(blob: bytes) -> str:
        name = blake3(blob).hexdigest()
        # A training in another process maps the file into memory: never write it again.
        if not (FOLDER / name).exists():
            write_atomically(FOLDER / name, blob)
        return name

    manifest = shard_documents(
        TextSpec(tokenizer="bytes"), MODEL.vocabulary, RUN, store, list(read_stdlib())
    )
    write_atomically(FOLDER / "manifest.json", manifest.model_dump_json().encode())


@cache
def open_text() -> TokenDataset:
    """Open the prepared text."""
    manifest = TextManifest.model_validate_json((FOLDER / "manifest.json").read_text())
    return TokenDataset(manifest, lambda digest: FOLDER / digest)


def sample_batch(seed: int, replica: int, step: int) -> Tensor:
    """Return a batch, int64 [SEQUENCES, context + 1], the same for every kind of training."""
    return open_text().sample_batch(seed, str(replica), step, SEQUENCES, MODEL.context)


def rate_scale(tokens: float, budget: int) -> float:
    """Return the learning rate's factor: a cosine after a warm-up of a twentieth of the budget."""
    return learning_rate_scale(Recipe(token_budget=budget, warmup_tokens=budget // 20), int(tokens))


class Replica:
    """Weights, their gradient and the inner optimizer's moments, fp32 [SIZE] each."""

    def __init__(self, case: Case) -> None:
        """Create a replica of zeros with a training's inner optimizer."""
        self.flat, self.gradient, self.m, self.v = (zeros() for _ in range(4))
        self._case = case
        self._gradient_divisor = 1.0
        self.steps = 0
        self.warmup_steps_left = 0
        self._weights = [_view_leaves(i, self.flat, self.gradient) for i in range(len(FRAGMENTS))]

    def compute_gradient(self, tokens: Tensor) -> float:
        """Compute the gradient of a batch, and return its loss.

        It is clipped at once for AdamW, as always; with Muon in the step, but for the matrices.
        """
        self.gradient.zero_()
        loss = _compute_loss(self._weights, tokens)
        loss.backward()
        divisor = max(1.0, float(self.gradient.norm()) / CLIP_NORM)
        if self._case.optimizer == MUON:
            self._gradient_divisor = divisor
        else:
            self.gradient.div_(divisor)
        return loss.item()

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """Step with the last gradient, at a lower rate while warm-up steps are left."""
        self.steps += 1
        rate *= 1 - self.warmup_steps_left / (WARMUP_STEPS + 1)
        self.warmup_steps_left = max(0, self.warmup_steps_left - 1)
        case = self._case
        matrix_rate = (
            MATRIX_RATE_RATIO * case.rate if case.matrix_rate is None else case.matrix_rate
        )
        for fragment, piece in zip(FRAGMENTS, SLICES, strict=True):
            weights, gradient, m, v = (
                buffer[piece] for buffer in (self.flat, self.gradient, self.m, self.v)
            )
            step = AdamWStep(
                fragment,
                self.steps,
                rate,
                case.weight_decay,
                self._gradient_divisor,
                matrix_rate=rate / case.rate * matrix_rate,
                beta2=case.beta2,
            )
            (layout,) = lay_out_tiles(fragment, fragment.size, case.optimizer)
            if layout.matrices:
                moments = MuonMoments(m, v[: layout.second_moments], None, None, layout)
                moments.update(step, 0, weights, gradient)
            else:
                AdamWKernel.prepare(step, 0, weights).apply(0, weights, gradient, m, v)

    @torch.no_grad()
    def validate(self, flat: Tensor, sequences: int) -> float:
        """Return the loss of other weights, always over the same windows.

        The replica's own weights stay as they are.

        Args:
            flat: the weights, fp32 [SIZE].
            sequences: how many held-out windows.
        """
        own = self.flat.clone()
        self.flat[:] = flat
        losses = [_compute_loss(self._weights, tokens).item() for tokens in _held_out(sequences)]
        self.flat[:] = own
        return sum(losses) / len(losses)


@cache
def _held_out(sequences: int) -> list[Tensor]:
    return open_text().validation_batches(sequences, MODEL.context, batch_sequences=64)


def _view_leaves(i: int, flat: Tensor, gradient: Tensor) -> Weights:
    """Return a fragment's tensors as views of `flat` whose gradients are views of `gradient`."""
    leaves = {}
    gradients = views(FRAGMENTS[i], gradient[SLICES[i]])
    for name, view in views(FRAGMENTS[i], flat[SLICES[i]]).items():
        leaves[name] = view.detach().requires_grad_()
        leaves[name].grad = gradients[name]
    return leaves


def _compute_loss(weights: list[Weights], tokens: Tensor) -> Tensor:
    tokens = tokens.to(DEVICE)
    x = GPT2.embed(weights[0], tokens[:, :-1])
    for block in weights[1:-1]:
        x = GPT2.block(block, x, MODEL)
    logits = head(weights[-1], weights[0]["token"], x, MODEL)
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
