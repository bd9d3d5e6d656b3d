"""The real transformers library reads an export: equal tokens, equal logits, and it generates.

Importing the library takes seconds, so all tests of this file run in one process.
"""

import json
import logging

import pytest
import torch
from helpers.worker.trained_models import (
    BPE,
    BYTES,
    SENTENCES,
    bpe_file,
    compute_logits,
    make_trained_model,
    with_layers,
)
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from barnraise.errors import StateError
from barnraise.text.prompt_codec import PromptCodec
from barnraise.training.model_files.hugging_face_export import export_hugging_face

pytestmark = [pytest.mark.xdist_group("transformers"), pytest.mark.filterwarnings("ignore")]
KINDS = {"bytes": (BYTES, None), "bpe": (BPE, bpe_file())}


@pytest.fixture(scope="module", params=KINDS)
def exported(request, tmp_path_factory):
    """Provide an exported model and its folder: (trained, folder)."""
    model, tokenizer = KINDS[request.param]
    trained = make_trained_model(model, tokenizer)
    folder = tmp_path_factory.mktemp(request.param)
    export_hugging_face(folder, trained)
    return trained, folder


@pytest.fixture(scope="module")
def loaded(exported):
    """Provide the model and the tokenizer as the Auto classes load them."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, folder = exported
    return AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def random_tokens(model, rows: int = 2) -> torch.Tensor:
    shape = (rows, model.context)
    return torch.randint(model.vocabulary, shape, generator=torch.Generator().manual_seed(9))


def test_logits_are_those_of_the_engine(exported, loaded):
    trained, _ = exported
    tokens = random_tokens(trained.model)
    with torch.no_grad():
        logits = loaded[0](tokens).logits
    torch.testing.assert_close(logits, compute_logits(trained, tokens), rtol=0, atol=1e-5)
    assert loaded[0].get_output_embeddings().weight is loaded[0].get_input_embeddings().weight


def test_tokens_are_those_of_training(exported, loaded):
    trained, _ = exported
    codec, tokenizer = PromptCodec(trained.tokenizer), loaded[1]
    for text in (*SENTENCES, "Ā is not NUL", "".join(map(chr, range(1, 0x250)))):
        ids = tokenizer(text)["input_ids"]
        assert ids == codec.encode(text)
        assert tokenizer.decode(ids) == codec.decode(ids) == text
    assert tokenizer("")["input_ids"] == []
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == tokenizer.bos_token_id == codec.end
    assert len(tokenizer) == codec.count <= trained.model.vocabulary
    assert tokenizer.decode([codec.end], skip_special_tokens=True) == ""


def test_byte_tokens_are_the_bytes_of_the_text(loaded, exported):
    if exported[0].tokenizer is None:
        text = "a\0b é"
        assert loaded[1](text)["input_ids"] == list(text.encode())


def test_tokenizer_that_adds_and_cuts_gives_the_tokens_of_training(tmp_path):
    from transformers import AutoTokenizer

    tokenizer = Tokenizer.from_buffer(bpe_file())
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=9)
    file = tokenizer.to_str().encode()
    export_hugging_face(tmp_path, make_trained_model(BPE, file))
    text = "The barn is raised together, " * 3
    ids = PromptCodec(file).encode(text)
    assert len(ids) > 4 and PromptCodec(file).decode(ids) == text
    assert AutoTokenizer.from_pretrained(tmp_path)(text)["input_ids"] == ids
    assert Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text).ids == ids


def test_generate_truncates_pads_and_samples(exported, loaded):
    trained, _ = exported
    model, tokenizer = loaded
    context = trained.model.context
    assert tokenizer.model_max_length == context
    long = tokenizer("barn " * 100, truncation=True, return_tensors="pt")
    assert long["input_ids"].shape == (1, context)
    assert model(**long).logits.shape[1] == context
    prompts = tokenizer(
        ["a", "raised together, " * 20],
        truncation=True,
        max_length=context - 8,
        padding=True,
        return_tensors="pt",
    )
    assert prompts["attention_mask"][0].sum() < context - 8
    torch.manual_seed(1)
    sampled = model.generate(**prompts, max_new_tokens=8, do_sample=True, top_p=0.9)
    assert sampled.shape == (2, context) and int(sampled.max()) < trained.model.vocabulary
    greedy = model.generate(**prompts, max_new_tokens=4, do_sample=False)
    # Padding changes nothing: the same continuation as of the prompt alone.
    alone = model.generate(**tokenizer("a", return_tensors="pt"), max_new_tokens=4, do_sample=False)
    assert greedy[0, -4:].tolist() == alone[0, -4:].tolist()


def test_pipeline_generates_up_to_the_context(exported, caplog, monkeypatch):
    from transformers import pipeline

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    trained, folder = exported
    generate = pipeline("text-generation", model=str(folder))
    with caplog.at_level("WARNING"):
        assert generate("The", max_new_tokens=20) and generate("The")
    assert not caplog.text, "the model card's example warns of nothing"
    assert generate("The", do_sample=True)[0]["generated_text"].startswith("The")
    tokens = generate("The", return_tensors=True)[0]["generated_token_ids"]
    assert 3 < len(tokens) <= trained.model.context
    batch = generate(["a", "b c d e"], batch_size=2, max_new_tokens=4)
    assert all(answer[0]["generated_text"] for answer in batch)
    held = generate("x " * 200, max_new_tokens=4, handle_long_generation="hole")
    assert held[0]["generated_text"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shards_and_bfloat16_load_with_the_same_logits(dtype, tmp_path):
    from transformers import AutoModelForCausalLM

    trained = make_trained_model(BPE, bpe_file())
    export_hugging_face(tmp_path, trained, dtype, shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 2
    stored = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert next(stored.parameters()).dtype == dtype, "the configuration names the type"
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = random_tokens(BPE)
    with torch.no_grad():
        logits = model(tokens).logits
    torch.testing.assert_close(logits, compute_logits(trained, tokens, dtype), rtol=0, atol=1e-5)


def test_card_states_run_text_tokens_contributors_loss_and_licence(exported):
    card = (exported[1] / "README.md").read_text()
    assert card.startswith('---\nlicense: "mit"\n')
    for fact in ("Barn   one", "standard library", "12,345", "3 machines", "1.5000 nats"):
        assert fact in card, fact


def test_state_of_another_model_is_refused_with_nothing_written(tmp_path):
    trained = with_layers(make_trained_model(BYTES), 3)
    with pytest.raises(StateError, match=r"no block\.2"):
        export_hugging_face(tmp_path, trained)
    assert not list(tmp_path.iterdir())
