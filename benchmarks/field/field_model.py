"""The model, text and batches that all systems of `make bench-exchange` train alike."""

import math
from collections.abc import Iterator
from functools import cache
from itertools import count
from pathlib import Path

import torch
import torch.nn.functional as F
from links import Shape
from torch import Tensor, nn

from barnraise.ledger.anchor import initial_weights
from barnraise.ledger.blob_store import BlobStore
from barnraise.models.functions import FUNCTIONS, head
from barnraise.models.weights import Weights, views
from barnraise.protocol.coordinator_messages import TextManifest
from barnraise.spec import Fragment, ModelSpec
from barnraise.text.batches import TokenDataset

GPT2 = FUNCTIONS["gpt2"]

MODEL = ModelSpec(layers=4, width=64, heads=4, context=64, vocabulary=256)
SHAPE = Shape("the benchmark's", MODEL.layers, MODEL.width, MODEL.parameters)
SEQUENCES = 64  # of a step of one worker
STEP_TOKENS = SEQUENCES * MODEL.context
SEED = 11
LEARNING_RATE = 3e-3
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
UNIT = 2.0**-26
VALIDATION_SEQUENCES = 128
MICROBATCHES = 16  # of a pipeline's step; fewer leave stages idle while it fills and drains
# Of a microbatch. A stage computes it for about as long as a message travels, as an RTX 3090 does
# with one sequence of 2,048 tokens of GPT 125M; with fewer, the delay alone would decide.
MICROBATCH_SEQUENCES = 32


class FieldGPT(nn.Module):
    """The model as other systems expect it: a module of parameters whose output is the loss."""

    def __init__(self, fragments: range | None = None, model: ModelSpec = MODEL) -> None:
        """Create the model with the weights of the benchmark's seed.

        Args:
            fragments: of the model's fragments, for a stage of a pipeline; None: all. The last
                stage has a copy of the tied head.
            model: its shape.
        """
        super().__init__()
        self.model = model
        layout = model.fragments()
        self.last = len(layout) - 1
        self.indices = list(fragments if fragments is not None else range(len(layout)))
        stored = set(self.indices) | ({0} if self.last in self.indices else set())
        self.fragments = nn.ModuleDict({str(i): _Weights(layout[i]) for i in sorted(stored)})

    def transform(self, x: Tensor) -> Tensor:
        """Return hidden states [sequences, tokens, width], or logits if the last fragment is here.

        Args:
            x: tokens, int64, if the first fragment is here; else hidden states.
        """
        for index in self.indices:
            weights = self._view_weights(index)
            if index == 0:
                x = GPT2.embed(weights, x)
            elif index < self.last:
                x = GPT2.block(weights, x, self.model)
            else:
                x = head(weights, self._view_weights(0)["token"], x, self.model)
        return x

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the loss of a batch, int64 [sequences, context + 1]."""
        return cross_entropy(self.transform(tokens[:, :-1]), tokens[:, 1:])

    def _view_weights(self, index: int) -> Weights:
        module = self.fragments[str(index)]
        return {name.replace("_", "."): value for name, value in module.named_parameters()}


class _Weights(nn.Module):
    """One fragment's tensors as parameters."""

    def __init__(self, fragment: Fragment) -> None:
        super().__init__()
        flat = initial_weights(fragment, SEED).float() * UNIT
        for name, value in views(fragment, flat).items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value.clone()))


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss in nats a token."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


@cache
def open_text(folder: Path) -> TokenDataset:
    """Open the text that the benchmark prepared in a folder."""
    manifest = TextManifest.model_validate_json((folder / "manifest.json").read_text())
    return TokenDataset(manifest, BlobStore(folder / "text", sweep=False).path)


def sample_batch(folder: Path, rank: int, step: int, sequences: int) -> Tensor:
    """Return a worker's batch of a step, int64 [sequences, context + 1]."""
    text = open_text(folder)
    return text.sample_batch(SEED, f"worker {rank}", step, sequences, MODEL.context)


def batches(folder: Path, rank: int, sequences: int = SEQUENCES) -> Iterator[Tensor]:
    """Yield a worker's batches, the same in every system; see `sample_batch`."""
    return (sample_batch(folder, rank, step, sequences) for step in count())


@torch.no_grad()
def validate(model: FieldGPT, folder: Path) -> float:
    """Return the loss on held-out windows, the same for every system; infinity if it diverged."""
    held_out = open_text(folder).validation_batches(
        VALIDATION_SEQUENCES, MODEL.context, batch_sequences=64
    )
    loss = sum(model(batch).item() for batch in held_out) / len(held_out)
    return loss if math.isfinite(loss) else math.inf


def flatten(model: nn.Module) -> Tensor:
    """Return all parameters in one vector, float32 [n]."""
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


@torch.no_grad()
def load_flat(model: nn.Module, flat: Tensor) -> None:
    """Set all parameters from one vector, float32 [n]."""
    offset = 0
    for parameter in model.parameters():
        size = parameter.numel()
        parameter.copy_(flat[offset : offset + size].view_as(parameter))
        offset += size


def create_adamw(parameters: Iterator[nn.Parameter] | list) -> torch.optim.AdamW:
    """Return the inner optimizer of all systems but ours, which has the same constants."""
    return torch.optim.AdamW(parameters, LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY)
