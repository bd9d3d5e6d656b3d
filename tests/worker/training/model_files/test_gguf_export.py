"""A GGUF file read back by the reference reader has our tensors, architecture and tokenizer."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from gguf import GGUFReader, TokenType
from helpers.worker.llama_models import QWEN, UNTIED
from helpers.worker.trained_models import (
    BPE,
    BYTES,
    bpe_file,
    compute_logits,
    make_trained_model,
)
from tokenizers import Tokenizer

from barnraise.errors import StateError
from barnraise.models.weights import views
from barnraise.training.model_files.gguf_export import export_gguf
from barnraise.training.model_files.tokenizer_files import byte_characters
from barnraise.training.model_files.transformers_config import model_config

TIED = replace(UNTIED, tied_head=True)
MODELS = {"bytes": BYTES, "bpe": BPE, "llama": UNTIED, "tied": TIED, "qwen3": QWEN}
# Slots → the names that llama.cpp reads their parts by (src/llama-arch.cpp).
ENDS = {
    "token": "token_embd.weight",
    "position": "position_embd.weight",
    "norm.weight": "output_norm.weight",
    "norm.bias": "output_norm.bias",
    "head": "output.weight",
}
PARTS = {
    "norm1": ["attn_norm"],
    "out": ["attn_output"],
    "norm2": ["ffn_norm"],
    "up": ["ffn_up"],
    "down": ["ffn_down"],
    "gate_up": ["ffn_gate", "ffn_up"],
    "query_norm": ["attn_q_norm"],
    "key_norm": ["attn_k_norm"],
}
QKV = {"gpt2": ["attn_qkv"], "llama": ["attn_q", "attn_k", "attn_v"]}


@pytest.fixture(params=MODELS)
def trained(request):
    """Provide a trained model of each architecture and kind of tokenizer."""
    model = MODELS[request.param]
    return make_trained_model(model, None if model is BYTES else bpe_file(290))


def field(reader: GGUFReader, name: str):
    return reader.fields[name].contents()


def expected_tensors(trained) -> dict[str, torch.Tensor]:
    """Return the model's tensors by llama.cpp's names, Llama's queries and keys in its order."""
    model, expected = trained.model, {}
    for fragment in model.fragments():
        weights = views(fragment, trained.load(fragment))
        for slot in fragment.slots:
            if not fragment.name.startswith("block."):
                expected[ENDS[slot.name]] = weights[slot.name]
                continue
            stem, kind = slot.name.split(".")
            parts = (PARTS | {"qkv": QKV[model.architecture]})[stem]
            sizes = slot.parts if len(parts) > 1 else slot.shape[:1]
            for part, values in zip(parts, weights[slot.name].split(sizes), strict=True):
                if part in ("attn_q", "attn_k") and not model.qk_norm:
                    values = torch.cat([pairs_of(h) for h in values.split(model.head_width)])
                expected[f"blk.{fragment.name[6:]}.{part}.{kind}"] = values
    return expected


def pairs_of(head: torch.Tensor) -> torch.Tensor:
    """Return the rows of a head with those next to each other that are rotated together."""
    left, right = head.chunk(2)
    return torch.stack([row for pair in zip(left, right, strict=True) for row in pair])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_read_back_are_those_of_the_model(dtype, trained, tmp_path):
    export_gguf(tmp_path, trained, dtype)
    read = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "model.gguf").tensors}
    expected = expected_tensors(trained)
    assert set(read) == set(expected)
    for name, values in expected.items():
        assert tuple(reversed(read[name].shape.tolist())) == tuple(values.shape)
        data = np.array(read[name].data)
        if dtype is torch.bfloat16 and values.dim() == 2 and name != ENDS["position"]:
            got = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
            values = values.to(torch.bfloat16)
        else:
            got = torch.from_numpy(data)
        assert torch.equal(got.reshape(values.shape), values), name
    assert (tmp_path / "Modelfile").read_text() == "FROM ./model.gguf\n"


@pytest.mark.integration
@pytest.mark.xdist_group("transformers")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_transformers_reads_the_file_and_gives_our_logits(dtype, trained, tmp_path):
    """It undoes llama.cpp's order of the rows of queries and keys."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    export_gguf(tmp_path, trained, dtype)
    config = AutoConfig.for_model(**model_config(trained.model, 0, "float32"))
    theirs = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    read = load_gguf_checkpoint(tmp_path / "model.gguf", return_tensors=True, model_to_load=theirs)
    names = theirs.load_state_dict(read["tensors"], strict=False)
    tied = {"lm_head.weight"} if trained.model.tied_head else set()
    assert set(names.missing_keys) <= tied and not names.unexpected_keys
    theirs.tie_weights()
    tokens = torch.randint(trained.model.vocabulary, (2, trained.model.context))
    with torch.no_grad():
        expected = theirs(tokens).logits
    distance = (compute_logits(trained, tokens, dtype) - expected).abs().max()
    assert distance <= (1e-5 if dtype is torch.float32 else 1e-2) * expected.abs().max()


def metadata_of(model) -> dict[str, object]:
    """Return what the metadata state of the architecture alone."""
    if model.architecture == "gpt2":
        return {"attention.layer_norm_epsilon": pytest.approx(1e-5)}
    return {
        "attention.layer_norm_rms_epsilon": pytest.approx(model.norm_epsilon),
        "attention.head_count_kv": model.key_value_heads,
        "attention.key_length": model.head_width,
        "attention.value_length": model.head_width,
        "rope.dimension_count": model.head_width,
        "rope.freq_base": model.rope_theta,
    }


def test_metadata_describes_model_and_tokenizer(trained, tmp_path):
    export_gguf(tmp_path, trained)
    reader = GGUFReader(tmp_path / "model.gguf")
    model = trained.model
    end = 255 if trained.tokenizer is None else 0
    kind = "qwen3" if model.qk_norm else model.architecture
    sizes = {
        "context_length": model.context,
        "embedding_length": model.width,
        "feed_forward_length": model.hidden_width,
        "block_count": model.layers,
        "attention.head_count": model.heads,
        **metadata_of(model),
    }
    expected = {
        "general.architecture": kind,
        "general.license": "mit",
        **{f"{kind}.{name}": value for name, value in sizes.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.bos_token_id": end,
        "tokenizer.ggml.eos_token_id": end,
        "tokenizer.ggml.padding_token_id": end,
        "tokenizer.ggml.add_bos_token": False,
    }
    assert {name: field(reader, name) for name in expected} == expected
    tokens = field(reader, "tokenizer.ggml.tokens")
    types = field(reader, "tokenizer.ggml.token_type")
    assert len(tokens) == len(types) == len(set(tokens)) == model.vocabulary
    assert tokens[end] == "<|endoftext|>" and types[end] == TokenType.CONTROL
    merges = field(reader, "tokenizer.ggml.merges")
    assert merges and all(len(merge.split(" ")) == 2 for merge in merges)
    if trained.tokenizer is None:
        assert tokens[:end] == byte_characters()[:end]
    else:
        assert tokens[-1] == f"[unused{model.vocabulary - 1}]"
        assert all("".join(merge.split(" ")) in tokens for merge in merges)


BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": False,
}
DIGITS = {"type": "Digits", "individual_digits": True}
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split_by(*first: dict, normalizer: str | None = None, **changes) -> dict:
    """Return settings of a tokenizer that splits words in two steps."""
    words = {"type": "Sequence", "pretokenizers": [*first, BYTE_LEVEL | changes]}
    return {"pre_tokenizer": words, "normalizer": normalizer and {"type": normalizer}}


def pattern(text: str) -> dict:
    return {"type": "Split", "pattern": {"Regex": text}, "behavior": "Isolated", "invert": False}


QWEN2 = LLAMA3.replace("{1,3}", "")


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        (split_by(DIGITS, use_regex=True), "smollm"),
        (split_by(pattern(LLAMA3)), "llama-bpe"),
        (split_by(pattern(QWEN2), normalizer="NFC"), "qwen2"),
    ],
)
def test_split_of_words_has_the_name_that_llama_cpp_knows(changes, name, tmp_path):
    changed = json.dumps({**json.loads(bpe_file(300)), **changes}).encode()
    export_gguf(tmp_path, make_trained_model(TIED, changed))
    assert field(GGUFReader(tmp_path / "model.gguf"), "tokenizer.ggml.pre") == name


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
        split_by(DIGITS),
        split_by(pattern(r"\w+")),
        split_by(pattern(LLAMA3), use_regex=True),
        split_by(pattern(LLAMA3), normalizer="NFC"),
        split_by(pattern(QWEN2), DIGITS, normalizer="NFC"),
    ],
)
def test_tokenizer_of_another_kind_is_refused_before_anything_is_written(changes, tmp_path):
    changed = json.dumps({**json.loads(bpe_file()), **changes}).encode()
    with pytest.raises(StateError, match="byte-level BPE that splits words"):
        export_gguf(tmp_path, make_trained_model(BPE, changed))
    assert not list(tmp_path.iterdir())


def test_added_tokens_are_special_or_of_the_user(tmp_path):
    tokenizer = Tokenizer.from_buffer(bpe_file())
    tokenizer.add_special_tokens(["<|im_end|>"])
    tokenizer.add_tokens(["barnraise"])
    export_gguf(tmp_path, make_trained_model(BPE, tokenizer.to_str().encode()))
    reader = GGUFReader(tmp_path / "model.gguf")
    kinds = dict(
        zip(
            field(reader, "tokenizer.ggml.tokens"),
            field(reader, "tokenizer.ggml.token_type"),
            strict=True,
        )
    )
    assert kinds["<|im_end|>"] == TokenType.CONTROL
    assert kinds["barnraise"] == TokenType.USER_DEFINED
