"""Train a tiny GPT, write text with it, and export it for Hugging Face's transformers.

    python examples/export_and_sample.py FOLDER [STEPS]

The model of a run needs no Python: `barnraise sample RUN` and `barnraise export RUN FOLDER` use
what this machine has saved last.
"""

import sys
import tempfile
from pathlib import Path

import torch
from train_alone import MODEL, train

from barnraise.swap.precision import UNIT
from barnraise.swap.sampler import Sampler, SamplingSettings, TokenRange
from barnraise.text.prompt_codec import PromptCodec
from barnraise.training.model_files.hugging_face_export import export_hugging_face
from barnraise.training.model_files.trained_model import TrainedModel

PROMPT = "def main("


def main(folder: Path, steps: int) -> None:
    """Train, print a text that begins with the prompt, and fill the empty folder."""
    with tempfile.TemporaryDirectory() as scratch:
        engine = train(steps, Path(scratch))
    sizes = [fragment.size for fragment in MODEL.fragments()]
    weights = engine.read_replica().split(sizes)  # of each fragment, fp32

    codec = PromptCodec(None)  # bytes
    sampler = Sampler(MODEL, lambda index: weights[index])
    vocabulary = TokenRange(codec.count, codec.end)
    generated = sampler.generate([codec.encode(PROMPT)], SamplingSettings(tokens=200), vocabulary)
    print(PROMPT + codec.decode([token for _, token in generated]))

    # A run's weights are integers, of which `UNIT` is one step.
    units = {f"anchor.{i}": (part / UNIT).round().int() for i, part in enumerate(weights)}
    folder.mkdir(parents=True, exist_ok=True)
    export_hugging_face(folder, TrainedModel(MODEL, units))
    print(f"transformers reads {folder}: GPT2LMHeadModel.from_pretrained({str(folder)!r})")


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    torch.manual_seed(1)
    main(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 200)
