"""Compare GPT-2's and Llama's architecture by their loss: `make study-architectures`.

Both have as good as the same number of parameters, see the same batches and have their own best
learning rate: each rate is trained with one seed, and the best one with all seeds. One machine
trains alone with AdamW, on the study's text. Each training is a line in
docs/benchmarks/architecture_study.jsonl: what is there is not trained again. A night on two cores.

    --quick   one small training of each architecture; writes nothing
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from study_model import open_text, prepare_text
from torch import Tensor

from barnraise.durable_io import write_atomically
from barnraise.ledger.anchor import initial_weights
from barnraise.models.functions import functions_of, head
from barnraise.models.weights import views
from barnraise.spec import ModelSpec, Recipe
from barnraise.swap.adamw import AdamWStep, adamw_update
from barnraise.swap.lr_schedule import learning_rate_scale
from barnraise.swap.precision import units_to_float

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks" / "architecture_study.jsonl"
SEQUENCES = 8
HELD_OUT = 512  # windows
STEPS = 2000
RATES = (0.001, 0.002, 0.003, 0.006)
SEEDS = (0, 1, 2)
SMALL = ModelSpec(layers=3, width=128, heads=4, context=64, vocabulary=256)
LARGER = ModelSpec(layers=6, width=192, heads=6, context=64, vocabulary=256)
# Feed-forward widths with which a block has as many parameters as GPT-2's.
MODELS = {
    "gpt2 small": SMALL,
    "llama small": replace(SMALL, architecture="llama", hidden=344),
    "gpt2 larger": LARGER,
    "llama larger": replace(LARGER, architecture="llama", hidden=520),
}


@dataclass(frozen=True)
class Training:
    """One training: a model's name, its peak learning rate, the seed and the steps."""

    model: str
    rate: float
    seed: int
    steps: int = STEPS


class Trainee:
    """A model with its gradients and moments, fp32."""

    def __init__(self, model: ModelSpec, seed: int) -> None:
        """Create the initial weights of a seed."""
        self.model, self.fragments = model, model.fragments()
        self.flats = [units_to_float(initial_weights(each, seed)) for each in self.fragments]
        self.gradients, self.m, self.v = (
            [torch.zeros_like(flat) for flat in self.flats] for _ in range(3)
        )
        self.weights = []
        for fragment, flat, gradient in zip(
            self.fragments, self.flats, self.gradients, strict=True
        ):
            sums = views(fragment, gradient)
            leaves = {
                name: view.detach().requires_grad_() for name, view in views(fragment, flat).items()
            }
            for name, leaf in leaves.items():
                leaf.grad = sums[name]
            self.weights.append(leaves)

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean loss of a batch, int64 [sequences, context + 1]."""
        functions, (fragment, name) = functions_of(self.model), self.model.head_table
        x = functions.embed(self.weights[0], batch[:, :-1])
        for block in self.weights[1:-1]:
            x = functions.block(block, x, self.model)
        logits = head(self.weights[-1], self.weights[fragment][name], x, self.model)
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def step(self, batch: Tensor, number: int, rate: float) -> None:
        """Make one AdamW step, clipped to a norm of 1."""
        for gradient in self.gradients:
            gradient.zero_()
        self.loss(batch).backward()
        norm = torch.stack([gradient.norm() for gradient in self.gradients]).norm()
        with torch.no_grad():
            for state in zip(
                self.fragments, self.flats, self.gradients, self.m, self.v, strict=True
            ):
                fragment, *tensors = state
                step = AdamWStep(fragment, number, rate, 0.1, max(1.0, float(norm)))
                adamw_update(step, 0, *tensors)


def train(training: Training) -> float:
    """Train a model alone, and return its loss on the held-out text."""
    model, text = MODELS[training.model], open_text()
    trainee = Trainee(model, training.seed)
    step_tokens = SEQUENCES * model.context
    budget = training.steps * step_tokens
    recipe = Recipe(token_budget=budget, warmup_tokens=budget // 20)
    for step in range(training.steps):
        batch = text.sample_batch(training.seed, "alone", step, SEQUENCES, model.context)
        rate = training.rate * learning_rate_scale(recipe, step * step_tokens)
        trainee.step(batch, step + 1, rate)
    with torch.no_grad():
        batches = text.validation_batches(HELD_OUT, model.context, batch_sequences=64)
        return fmean(trainee.loss(batch).item() for batch in batches)


def read_results() -> dict[Training, float]:
    """Return the losses of the trainings in the file."""
    if not RESULTS.exists():
        return {}
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()]
    return {
        Training(**{name: line[name] for name in ("model", "rate", "seed", "steps")}): line["loss"]
        for line in lines
    }


def run(training: Training, results: dict[Training, float]) -> float:
    """Return a training's loss; train and store it unless it is known."""
    if training not in results:
        results[training] = round(train(training), 5)
        lines = [json.dumps({**asdict(each), "loss": loss}) for each, loss in results.items()]
        write_atomically(RESULTS, ("\n".join(lines) + "\n").encode())
        print(training, results[training], flush=True)
    return results[training]


def main() -> None:
    """Train what is missing, and print the mean loss of each model at its best rate."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    prepare_text()
    if parser.parse_args().quick:
        names = ("gpt2 small", "llama small")
        print(json.dumps({name: round(train(Training(name, 0.003, 0, 50)), 4) for name in names}))
        return
    results, figures = read_results(), {}
    for name, model in MODELS.items():
        losses = {rate: run(Training(name, rate, SEEDS[0]), results) for rate in RATES}
        best = min(losses, key=lambda rate: losses[rate])
        mean = fmean(run(Training(name, best, seed), results) for seed in SEEDS)
        figures[name] = {"parameters": model.parameters, "rate": best, "loss": round(mean, 4)}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
