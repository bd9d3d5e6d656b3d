"""Write a trained model as one GGUF file, for llama.cpp and Ollama.

Architectures and tensors have the names that the transformers library's have in the tables of
`gguf`. Matrices are those of a fragment, but for the order of rows in Llama's queries and keys.
Without `output.weight` in the file the head is the table of tokens.
"""

import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from gguf import (
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFWriter,
    LlamaFileType,
    TokenType,
    get_tensor_name_map,
)
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.weights import views
from barnraise.spec import Slot
from barnraise.text.tokenizer import END_BYTE
from barnraise.text.tokenizer_file import LLAMA3_WORDS, QWEN2_WORDS
from barnraise.training.model_files.tokenizer_files import (
    ExportedTokenizer,
    byte_characters,
)
from barnraise.training.model_files.trained_model import TrainedModel
from barnraise.training.model_files.transformers_formats import format_of
from barnraise.training.model_files.transformers_names import TransformersTensor

MODEL_FILE, OLLAMA_FILE = "model.gguf", "Modelfile"
_ROTATED = ("attn_q.weight", "attn_k.weight")
# The names that llama.cpp has for the rules by which byte-level BPEs split words.
_SPLIT_PATTERNS = {LLAMA3_WORDS: "llama-bpe", QWEN2_WORDS: "qwen2"}
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
        StateError: A fragment is missing or of another shape, or llama.cpp would read the
            tokenizer's words differently. Then nothing is written.
    """
    trained.check()
    split = "gpt-2" if trained.tokenizer is None else _name_split(trained.tokenizer)
    model = trained.model
    form = format_of(model)
    writer = GGUFWriter(folder / MODEL_FILE, form.model_type)
    _add_model(writer, trained, dtype)
    _add_tokenizer(writer, trained, split)
    tensors_of, names = form.names.tensors, _name_map(form.model_type, model.layers)
    for fragment in model.fragments():
        for tensor in tensors_of(fragment):
            value_type = _value_type(tensor.slot, dtype)
            itemsize = 4 if value_type is GGMLQuantizationType.F32 else 2
            *rows, columns = tensor.our_shape
            # Raw 16-bit values are described by their bytes' shape.
            writer.add_tensor_info(
                names(tensor),
                (*rows, columns if itemsize == 4 else 2 * columns),
                np.dtype(np.float32 if itemsize == 4 else np.uint8),
                itemsize * math.prod(tensor.our_shape),
                raw_dtype=value_type,
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for fragment in model.fragments():
        weights = views(fragment, trained.load(fragment))
        for tensor in tensors_of(fragment):
            values = tensor.our_view(weights)
            if form.pairs_neighbours and names(tensor).endswith(_ROTATED):
                values = _pair_neighbours(values, model.head_width)
            writer.write_tensor_data(_to_array(values, _value_type(tensor.slot, dtype)))
        del weights  # free it before the next fragment is loaded
    writer.close()
    (folder / OLLAMA_FILE).write_text(f"FROM ./{MODEL_FILE}\n", encoding="utf-8")


def _name_map(kind: str, layers: int) -> Callable[[TransformersTensor], str]:
    """Return the function that names tensors as llama.cpp does."""
    architecture = {name: number for number, name in MODEL_ARCH_NAMES.items()}[kind]
    table = get_tensor_name_map(architecture, layers)

    def name_tensor(tensor: TransformersTensor) -> str:
        name = table.get_name(tensor.name, try_suffixes=(".weight", ".bias"))
        assert name is not None, f"gguf's table lacks {tensor.name}"
        return name

    return name_tensor


def _pair_neighbours(matrix: Tensor, head_width: int) -> Tensor:
    """Order the rows of each head so that those which are rotated together are neighbours."""
    heads = matrix.unflatten(0, (-1, 2, head_width // 2))
    return heads.transpose(1, 2).reshape(matrix.shape)


def _name_split(content: bytes) -> str:
    """Return llama.cpp's name of the rule by which a byte-level BPE splits words.

    Raises:
        StateError: llama.cpp has no such rule, or the tokenizer is none; with what to do.
    """
    tokenizer = json.loads(content)
    words = tokenizer.get("pre_tokenizer") or {}
    *first, last = words.get("pretokenizers") or [words]
    name = ""
    if not first:
        name = "gpt-2"
    elif len(first) == 1 and first[0].get("type") == "Digits" and first[0].get("individual_digits"):
        name = "smollm"
    elif len(first) == 1 and first[0].get("behavior") == "Isolated":
        name = _SPLIT_PATTERNS.get((first[0].get("pattern") or {}).get("Regex", ""), "")
    # Qwen's tokenizer composes characters first; llama.cpp reads text that is composed already.
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    is_byte_level = (
        tokenizer["model"].get("type", "BPE") == "BPE"
        and not tokenizer["model"].get("byte_fallback")
        and normalizer == ("NFC" if name == "qwen2" else None)
        and last.get("type") == "ByteLevel"
        and not last.get("add_prefix_space")
        and last.get("use_regex", True) == (name in ("gpt-2", "smollm"))
    )
    if not (name and is_byte_level):
        raise StateError(
            "a GGUF file is written only with a byte-level BPE that splits words as GPT-2's, "
            "SmolLM's, Llama 3's or Qwen's does, and this run's tokenizer is another one: export "
            "with --format hf, and convert that with llama.cpp's convert_hf_to_gguf.py"
        )
    return name


def _token_types(tokenizer: ExportedTokenizer) -> list[TokenType]:
    types = [TokenType.NORMAL] * len(tokenizer.tokens)
    for added in json.loads(tokenizer.content).get("added_tokens", []):
        is_special = bool(added.get("special"))
        types[added["id"]] = TokenType.CONTROL if is_special else TokenType.USER_DEFINED
    types[tokenizer.end_id] = TokenType.CONTROL
    return types


def _add_model(writer: GGUFWriter, trained: TrainedModel, dtype: torch.dtype) -> None:
    model = trained.model
    if trained.facts is not None:
        writer.add_name(trained.facts.name)
        writer.add_license(trained.facts.licence)
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.width)
    writer.add_feed_forward_length(model.hidden_width)
    writer.add_block_count(model.layers)
    writer.add_head_count(model.heads)
    writer.add_file_type(_FILE_TYPES[dtype])
    writer.add_vocab_size(model.vocabulary)
    for function, attribute in format_of(model).gguf_functions.items():
        getattr(writer, function)(getattr(model, attribute))


def _add_tokenizer(writer: GGUFWriter, trained: TrainedModel, split: str) -> None:
    tokenizer = ExportedTokenizer.of_run(trained.tokenizer)
    tokens = list(tokenizer.tokens)
    types = _token_types(tokenizer)
    missing = trained.model.vocabulary - len(tokens)
    tokens += [""] * missing
    types += [TokenType.UNUSED] * missing
    for number, token in enumerate(tokens):
        if not token:  # numbers may be missing in between, too
            tokens[number], types[number] = f"[unused{number}]", TokenType.UNUSED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
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


def _value_type(slot: Slot, dtype: torch.dtype) -> GGMLQuantizationType:
    is_matrix = len(slot.shape) == 2 and slot.name != "position"
    if is_matrix and dtype is torch.bfloat16:
        return GGMLQuantizationType.BF16
    return GGMLQuantizationType.F32


def _to_array(values: Tensor, kind: GGMLQuantizationType) -> np.ndarray:
    if kind is GGMLQuantizationType.F32:
        return values.contiguous().numpy()
    return values.to(torch.bfloat16).contiguous().view(torch.int16).numpy().view(np.uint8)
