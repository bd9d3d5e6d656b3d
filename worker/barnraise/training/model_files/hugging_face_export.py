"""Write a trained model as the transformers library reads it."""

import json
from pathlib import Path
from typing import Any

import torch

from barnraise.spec import Fragment, ModelSpec
from barnraise.training.model_files.model_card import CARD_FILE, write_card
from barnraise.training.model_files.safetensors_file import write_fragments
from barnraise.training.model_files.tokenizer_files import (
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ExportedTokenizer,
)
from barnraise.training.model_files.trained_model import TrainedModel
from barnraise.training.model_files.transformers_config import (
    CONFIG_FILE,
    GENERATION_CONFIG_FILE,
    generation_config,
    model_config,
)
from barnraise.training.model_files.transformers_formats import format_of

SINGLE_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
SHARD_BYTES = 2 << 30  # of an exported file, about


def export_hugging_face(
    folder: Path,
    trained: TrainedModel,
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write weights, configuration, tokenizer and card. One fragment is in memory at a time.

    Args:
        folder: an empty folder.
        trained: the model.
        dtype: of the weights.
        shard_bytes: size of a safetensors file, about. A larger model is written in several, with
            an index.

    Raises:
        StateError: A fragment is missing or of another shape. Then nothing is written.
    """
    trained.check()
    model = trained.model
    tokenizer = ExportedTokenizer.of_run(trained.tokenizer)
    tensors_of = format_of(model).names.tensors
    shards = _split_into_shards(model, shard_bytes, dtype)
    count = len(shards)
    names = [SINGLE_FILE]
    if count > 1:
        names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    for name, fragments in zip(names, shards, strict=True):
        write_fragments(folder / name, fragments, trained.load, tensors_of, dtype)
    if count > 1:
        weight_map = {
            tensor.name: name
            for name, fragments in zip(names, shards, strict=True)
            for fragment in fragments
            for tensor in tensors_of(fragment)
        }
        total = {"total_size": dtype.itemsize * model.parameters}
        _write_json(folder / INDEX_FILE, {"metadata": total, "weight_map": weight_map})
    config = model_config(model, tokenizer.end_id, str(dtype).removeprefix("torch."))
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_CONFIG_FILE, generation_config(model, tokenizer.end_id))
    (folder / TOKENIZER_FILE).write_bytes(tokenizer.content)
    _write_json(folder / TOKENIZER_CONFIG_FILE, tokenizer.config(model.context))
    if trained.facts is not None:
        (folder / CARD_FILE).write_text(write_card(trained.facts), encoding="utf-8")


def _split_into_shards(
    model: ModelSpec, shard_bytes: int, dtype: torch.dtype
) -> list[list[Fragment]]:
    shards: list[list[Fragment]] = [[]]
    for fragment in model.fragments():
        size = sum(dtype.itemsize * earlier.size for earlier in shards[-1])
        if size and size + dtype.itemsize * fragment.size > shard_bytes:
            shards.append([])
        shards[-1].append(fragment)
    return shards


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
