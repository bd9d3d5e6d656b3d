"""Write a trained model as one GGUF file, for llama.cpp and Ollama.

GGUF has GPT-2's architecture with the same matrices as ours; the head is tied to the token table
when the file has no `output.weight`. The tokenizer is GPT-2's byte-level BPE.
"""

import json
import math
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, LlamaFileType, TokenType
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.gpt2 import NORM_EPSILON
from barnraise.models.weights import views
from barnraise.spec import Fragment, Slot
from barnraise.spec.architectures import architecture_of
from barnraise.text.tokenizer import END_BYTE
from barnraise.training.model_files.tokenizer_files import (
    ExportedTokenizer,
    byte_characters,
)
from barnraise.training.model_files.trained_model import TrainedModel

MODEL_FILE, OLLAMA_FILE = "model.gguf", "Modelfile"
# Slots outside the blocks → their names in GGUF.
_NAMES = {
    "token": "token_embd.weight",
    "position": "position_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm.bias": "output_norm.bias",
}
# Parts of a block → their names there.
_PARTS = {
    "norm1": "attn_norm",
    "qkv": "attn_qkv",
    "out": "attn_output",
    "norm2": "ffn_norm",
    "up": "ffn_up",
    "down": "ffn_down",
}
_FILE_TYPES = {
    torch.float32: LlamaFileType.ALL_F32,
    torch.bfloat16: LlamaFileType.MOSTLY_BF16,
}


def export_gguf(folder: Path, trained: TrainedModel, dtype: torch.dtype = torch.float32) -> None:
    """Write `model.gguf` and a Modelfile for Ollama. One fragment is in memory at a time.

    Args:
        folder: an empty folder.
        trained: the model.
        dtype: of the matrices. Vectors and positions are always fp32, as llama.cpp wants them.

    Raises:
        StateError: A fragment is missing or of another shape, or the tokenizer is of a kind that
            GGUF's "gpt2" would read differently. Then nothing is written.
    """
    trained.check()
    architecture = architecture_of(trained.model)
    if not architecture.has_gguf:
        raise StateError(
            f"no GGUF file is written of a {architecture.title} yet: export with --format hf, and "
            "convert that with llama.cpp's convert_hf_to_gguf.py"
        )
    if trained.tokenizer is not None:
        _check_tokenizer(trained.tokenizer)
    path = folder / MODEL_FILE
    writer = GGUFWriter(path, architecture.name)
    _add_metadata(writer, trained, dtype)
    fragments = trained.model.fragments()
    for fragment in fragments:
        for slot in fragment.slots:
            kind = _value_type(slot, dtype)
            itemsize = 4 if kind is GGMLQuantizationType.F32 else 2
            # Raw 16-bit values are described by their bytes' shape.
            shape = slot.shape if itemsize == 4 else (*slot.shape[:-1], 2 * slot.shape[-1])
            writer.add_tensor_info(
                _gguf_name(fragment, slot),
                shape,
                np.dtype(np.float32 if itemsize == 4 else np.uint8),
                itemsize * math.prod(slot.shape),
                raw_dtype=kind,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for fragment in fragments:
        weights = views(fragment, trained.load(fragment))
        for slot in fragment.slots:
            writer.write_tensor_data(_to_array(weights[slot.name], _value_type(slot, dtype)))
        del weights  # free it before the next fragment is loaded
    writer.close()
    (folder / OLLAMA_FILE).write_text(f"FROM ./{MODEL_FILE}\n", encoding="utf-8")


def _check_tokenizer(content: bytes) -> None:
    """Refuse a tokenizer that is not a byte-level BPE which splits words as GPT-2's does.

    Raises:
        StateError: with what to do.
    """
    tokenizer = json.loads(content)
    words = tokenizer.get("pre_tokenizer") or {}
    is_gpt2 = (
        tokenizer["model"].get("type", "BPE") == "BPE"
        and not tokenizer["model"].get("byte_fallback")
        and not tokenizer.get("normalizer")
        and words.get("type") == "ByteLevel"
        and not words.get("add_prefix_space")
        and words.get("use_regex", True)
    )
    if not is_gpt2:
        raise StateError(
            "a GGUF file is written only with a byte-level BPE of GPT-2's kind, and this run's "
            "tokenizer is another one: export with --format hf, and convert that with llama.cpp's "
            "convert_hf_to_gguf.py"
        )


def _token_types(tokenizer: ExportedTokenizer) -> list[TokenType]:
    types = [TokenType.NORMAL] * len(tokenizer.tokens)
    for added in json.loads(tokenizer.content).get("added_tokens", []):
        is_special = bool(added.get("special"))
        types[added["id"]] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    types[tokenizer.end_id] = TokenType.CONTROL
    return types


def _add_metadata(writer: GGUFWriter, trained: TrainedModel, dtype: torch.dtype) -> None:
    model = trained.model
    if trained.facts is not None:
        writer.add_name(trained.facts.name)
        writer.add_license(trained.facts.licence)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(4 * model.width)
    writer.add_block_count(model.layers)
    writer.add_head_count(model.heads)
    writer.add_layer_norm_eps(NORM_EPSILON)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_vocab_size(model.vocabulary)
    tokenizer = ExportedTokenizer.of_run(trained.tokenizer)
    tokens = list(tokenizer.tokens)
    types = _token_types(tokenizer)
    missing = model.vocabulary - len(tokens)
    tokens += [""] * missing
    types += [TokenType.UNUSED] * missing
    for number, token in enumerate(tokens):
        if not token:  # numbers may be missing in between, too
            tokens[number], types[number] = f"[unused{number}]", TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([f"{left} {right}" for left, right in _list_merges(tokenizer)])
    writer.add_bos_token_id(tokenizer.end_id)
    writer.add_eos_token_id(tokenizer.end_id)
    writer.add_pad_token_id(tokenizer.end_id)
    writer.add_add_bos_token(False)


def _list_merges(tokenizer: ExportedTokenizer) -> tuple[tuple[str, str], ...]:
    """Return the merges; plain bytes have one that never applies.

    llama.cpp does not load a file without merges. No text has the byte 0xFF, still less two.
    """
    if tokenizer.merges:
        return tokenizer.merges
    end = byte_characters()[END_BYTE]
    return ((end, end),)


def _gguf_name(fragment: Fragment, slot: Slot) -> str:
    if not fragment.name.startswith("block."):
        return _NAMES[slot.name]
    part, kind = slot.name.split(".")
    return f"blk.{fragment.name.removeprefix('block.')}.{_PARTS[part]}.{kind}"


def _value_type(slot: Slot, dtype: torch.dtype) -> GGMLQuantizationType:
    is_matrix = len(slot.shape) == 2 and slot.name != "position"
    if is_matrix and dtype is torch.bfloat16:
        return GGMLQuantizationType.BF16
    return GGMLQuantizationType.F32


def _to_array(values: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    if kind is GGMLQuantizationType.F32:
        return values.contiguous().numpy()
    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
