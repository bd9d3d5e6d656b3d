"""Small models with arbitrary weights, and the logits that our functions compute from them."""

import dataclasses
from collections.abc import Sequence

import torch
from tokenizers import Tokenizer

from barnraise.ledger.anchor import initial_weights
from barnraise.models.functions import functions_of, head
from barnraise.models.weights import views
from barnraise.spec import ModelSpec, RunSpec, TextSpec
from barnraise.text.tokenizer import train_tokenizer
from barnraise.training.model_files.model_card import CardFacts
from barnraise.training.model_files.trained_model import TrainedModel

BYTES = ModelSpec(layers=2, width=32, heads=4, context=24, vocabulary=256)
BPE = ModelSpec(layers=3, width=48, heads=3, context=32, vocabulary=333)
SENTENCES = ["The barn is raised together.", "Wände, Dächer und Öfen – 大家!", "x = [1, 2]\n\ty"]
DOCUMENTS = [sentence.encode() * 5 for sentence in SENTENCES]
RUN = "01890000-0000-7000-8000-000000000000"


def bpe_file(vocabulary: int = 320) -> bytes:
    """Return the content of a BPE's file."""
    return train_tokenizer(DOCUMENTS, vocabulary).to_str().encode()


def larger_bpe_file(tokens: int) -> bytes:
    """Return the content of a BPE's file with so many tokens, more than its text gives."""
    tokenizer = Tokenizer.from_buffer(bpe_file())
    tokenizer.add_tokens([f"word-{n}" for n in range(tokens - tokenizer.get_vocab_size())])
    return tokenizer.to_str().encode()


def make_trained_model(model: ModelSpec, tokenizer: bytes | None = None) -> TrainedModel:
    """Return a model whose norms and biases are not at their initial values either."""
    noise = torch.Generator().manual_seed(5)
    tensors = {}
    for fragment in model.fragments():
        units = initial_weights(fragment, 3)
        for slot in fragment.slots:  # padding stays zero
            part = units[slot.offset : slot.offset + slot.size]
            part += torch.randint(-(1 << 22), 1 << 22, part.shape, generator=noise).int()
        tensors[f"anchor.{fragment.index}"] = units
    text = TextSpec(tokenizer="bpe" if tokenizer else "bytes")
    facts = CardFacts("Barn | one", RUN, RunSpec(model, text), 12_345, 3, (12_000, 1.5), "mit")
    return TrainedModel(model, tensors, tokenizer, facts)


def logits_of(
    model: ModelSpec, fragments: Sequence[torch.Tensor], tokens: torch.Tensor
) -> torch.Tensor:
    """Return the logits of tokens [B, T] by the engine's functions; fragments are fp32 [n]."""
    functions = functions_of(model)
    weights = [views(f, flat) for f, flat in zip(model.fragments(), fragments, strict=True)]
    x = functions.embed(weights[0], tokens)
    for block in weights[1:-1]:
        x = functions.block(block, x, model)
    fragment, name = model.head_table
    return head(weights[-1], weights[fragment][name], x, model)


def compute_logits(
    trained: TrainedModel, tokens: torch.Tensor, dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Return the logits of tokens [B, T] with weights that are rounded once."""
    layout = trained.model.fragments()
    with torch.no_grad():
        fragments = [trained.load(fragment).to(dtype).float() for fragment in layout]
        return logits_of(trained.model, fragments, tokens)


def with_layers(trained: TrainedModel, layers: int) -> TrainedModel:
    """Return the same tensors as those of a model with another number of layers."""
    return dataclasses.replace(trained, model=dataclasses.replace(trained.model, layers=layers))
