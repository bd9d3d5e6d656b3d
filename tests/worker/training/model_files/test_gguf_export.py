"""A GGUF file read back by the reference reader has our tensors, architecture and tokenizer."""

import json

import numpy as np
import pytest
import torch
from gguf import GGUFReader, TokenType
from helpers.worker.trained_models import BPE, BYTES, bpe_file, make_trained_model
from tokenizers import Tokenizer

from barnraise.errors import StateError
from barnraise.models.weights import views
from barnraise.training.model_files.gguf_export import export_gguf
from barnraise.training.model_files.tokenizer_files import byte_characters

KINDS = {"bytes": (BYTES, None), "bpe": (BPE, bpe_file())}


@pytest.fixture(params=KINDS)
def trained(request):
    """Provide a trained model of each kind of tokenizer."""
    return make_trained_model(*KINDS[request.param])


def field(reader: GGUFReader, name: str):
    return reader.fields[name].contents()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_read_back_are_those_of_the_model(dtype, trained, tmp_path):
    export_gguf(tmp_path, trained, dtype)
    reader = GGUFReader(tmp_path / "model.gguf")
    read = {tensor.name: tensor for tensor in reader.tensors}
    assert len(read) == sum(len(fragment.slots) for fragment in trained.model.fragments())
    for fragment in trained.model.fragments():
        weights = views(fragment, trained.load(fragment))
        for name, values in weights.items():
            tensor = read[gguf_name(fragment.name, name)]
            assert tuple(reversed(tensor.shape.tolist())) == tuple(values.shape)
            data = np.array(tensor.data)
            if dtype is torch.bfloat16 and values.dim() == 2 and name != "position":
                got = torch.from_numpy(data.view(np.int16)).view(torch.bfloat16)
                values = values.to(torch.bfloat16)
            else:
                got = torch.from_numpy(data)
            assert torch.equal(got.reshape(values.shape), values), name
    assert (tmp_path / "Modelfile").read_text() == "FROM ./model.gguf\n"


def gguf_name(fragment: str, name: str) -> str:
    """Return the name that llama.cpp's own table of GPT-2's tensors leads to."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    from barnraise.training.model_files.gpt2_names import transformers_tensors

    table = get_tensor_name_map(MODEL_ARCH.GPT2, 16)
    for layout in BPE.fragments():
        for tensor in transformers_tensors(layout):
            if (layout.name, tensor.slot.name) == (fragment, name):
                stem, kind = tensor.name.rsplit(".", 1)
                return f"{table.get_name(stem)}.{kind}"
    raise AssertionError(name)


def test_metadata_describes_model_and_tokenizer(trained, tmp_path):
    export_gguf(tmp_path, trained)
    reader = GGUFReader(tmp_path / "model.gguf")
    model = trained.model
    end = 255 if trained.tokenizer is None else 0
    expected = {
        "general.architecture": "gpt2",
        "general.license": "mit",
        "gpt2.context_length": model.context,
        "gpt2.embedding_length": model.width,
        "gpt2.feed_forward_length": 4 * model.width,
        "gpt2.block_count": model.layers,
        "gpt2.attention.head_count": model.heads,
        "gpt2.attention.layer_norm_epsilon": pytest.approx(1e-5),
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


@pytest.mark.parametrize(
    "changes",
    [
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Lowercase"}},
    ],
)
def test_tokenizer_of_another_kind_is_refused_before_anything_is_written(changes, tmp_path):
    changed = json.dumps({**json.loads(bpe_file()), **changes}).encode()
    with pytest.raises(StateError, match="byte-level BPE of GPT-2's kind"):
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
