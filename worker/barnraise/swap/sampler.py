"""Generate and score text layer by layer, so that a model larger than memory is like a small one.

For every new token all sequences pass one layer before the next layer's weights are loaded: the
weights travel once a token, whatever the number of sequences. To score texts they travel once.
Keys and values of earlier tokens are cached. The weights of the first layers stay in memory as far
as a budget allows; the order of use is a cycle, in which a fixed set is the best choice.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from barnraise.errors import StateError
from barnraise.models.functions import functions_of, head
from barnraise.models.weights import KeyValueCache, Weights, views
from barnraise.planning.hardware import return_freed_memory
from barnraise.planning.memory_model import PREFILL_CHUNK
from barnraise.spec import ModelSpec

HEAD_ROWS = 32  # logits that are computed at once: a row of a large vocabulary takes a megabyte
DIVERGED = "the model's output is not finite: its weights have diverged"
LoadWeights = Callable[[int], Tensor]  # a fragment's index → its weights, fp32 [n], in RAM


@dataclass(frozen=True)
class SamplingSettings:
    """How text is generated.

    Attributes:
        tokens: new tokens, at most.
        temperature: what logits are divided by; 0 always picks the likeliest token.
        top_p: picks among the likeliest tokens that have this probability together.
        seed: the same seed gives the same text from the same weights.
    """

    tokens: int = 100
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int = 0


@dataclass(frozen=True)
class TokenRange:
    """Which tokens may be generated.

    Attributes:
        count: tokens from this number on stand for no text.
        end: the token after which a sequence is complete.
    """

    count: int
    end: int


@dataclass(frozen=True)
class Continuation:
    """A text whose last `count` tokens are scored, given all before them: at least one."""

    tokens: Sequence[int]
    count: int


@dataclass
class _Sequence:
    """One text being written.

    Attributes:
        number: its place among the prompts.
        tokens: all tokens, the prompt's included.
        caches: one for each layer.
        generator: draws its tokens.
        pending: how many of the last tokens have not passed the layers yet.
        left: how many tokens may still be added.
    """

    number: int
    tokens: list[int]
    caches: list[KeyValueCache]
    generator: torch.Generator
    pending: int
    left: int
    stream: Tensor = field(default_factory=lambda: torch.empty(0))


class Sampler:
    """Generate or score continuations of token sequences with weights that `load` returns."""

    def __init__(
        self,
        model: ModelSpec,
        load: LoadWeights,
        resident_bytes: int = 0,
        device: str = "cpu",
    ) -> None:
        """Prepare to generate; nothing is loaded yet.

        The layers compute on `device`. Those that stay loaded between two tokens take
        `resident_bytes` at most.
        """
        self._model = model
        self._functions = functions_of(model)
        self._fragments = model.fragments()
        self._load = load
        self._resident_bytes = resident_bytes
        self._device = torch.device(device)
        self._resident: dict[int, Weights] = {}

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[Sequence[int]], settings: SamplingSettings, vocabulary: TokenRange
    ) -> Iterator[tuple[int, int]]:
        """Generate a continuation of each prompt, all of them together.

        An empty prompt begins a new document.

        Yields:
            (number of the prompt, its next token). The end token is not among them.

        Raises:
            StateError: The weights are damaged: the model's output is not a number.
        """
        longest = max((len(prompt) for prompt in prompts), default=0)
        capacity = min(self._model.context, max(1, longest) + settings.tokens)
        active = [
            self._new_sequence(number, prompt or [vocabulary.end], capacity, settings)
            for number, prompt in enumerate(prompts)
        ]
        # On a GPU the table comes and goes like a layer: it may be as large as one.
        embedding = views(self._fragments[0], self._load(0))
        final = self._load_weights(len(self._fragments) - 1, stays=True)
        while active := [sequence for sequence in active if sequence.left > 0]:
            for sequence in active:
                self._embed_pending(embedding, sequence, capacity)
            for layer in range(self._model.layers):
                weights = self._load_weights(1 + layer)
                for sequence in active:
                    cache = sequence.caches[layer]
                    sequence.stream = self._pass_parts(weights, sequence.stream, cache)
                del weights  # free it before the next layer is loaded
            fragment, name = self._model.head_table
            table = (final if fragment else embedding)[name].to(self._device)
            for sequence in active:
                logits = head(final, table, sequence.stream[:, -1:], self._model)[0, 0]
                token = _choose_token(logits[: vocabulary.count], settings, sequence.generator)
                sequence.pending = 1
                sequence.left -= 1
                if token == vocabulary.end:
                    sequence.left = 0
                    continue
                sequence.tokens.append(token)
                yield sequence.number, token
            del table
        self._resident.clear()

    @torch.no_grad()
    def score(self, texts: Sequence[Continuation]) -> list[float]:
        """Return the logarithm of each continuation's probability, in nats.

        Raises:
            StateError: The weights are damaged: the model's output is not a number.
        """
        embedding = views(self._fragments[0], self._load(0))
        final = self._load_weights(len(self._fragments) - 1, stays=True)
        streams = [
            self._functions.embed(embedding, torch.tensor([text.tokens[:-1]])).to(self._device)
            for text in texts
        ]
        for layer in range(self._model.layers):
            weights = self._load_weights(1 + layer)
            for place, stream in enumerate(streams):
                cache = KeyValueCache.empty(self._model, stream.shape[1], self._device)
                streams[place] = self._pass_parts(weights, stream, cache)
            del weights  # free it before the next layer is loaded
        fragment, name = self._model.head_table
        table = (final if fragment else embedding)[name].to(self._device)
        return [
            self._sum_logarithms(final, table, stream, text)
            for stream, text in zip(streams, texts, strict=True)
        ]

    def _sum_logarithms(
        self, final: Weights, table: Tensor, stream: Tensor, text: Continuation
    ) -> float:
        """Sum the logarithms of the scored tokens' probabilities."""
        total = 0.0
        targets = torch.tensor(text.tokens[-text.count :], device=self._device)
        rows = stream[:, -text.count :].split(HEAD_ROWS, dim=1)
        for part, expected in zip(rows, targets.split(HEAD_ROWS), strict=True):
            logits = head(final, table, part, self._model)[0].float()
            chosen = logits.gather(1, expected[:, None])[:, 0]
            total += float((chosen - logits.logsumexp(1)).double().sum())
        if not math.isfinite(total):
            raise StateError(DIVERGED)
        return total

    def _new_sequence(
        self, number: int, prompt: Sequence[int], capacity: int, settings: SamplingSettings
    ) -> _Sequence:
        tokens = list(prompt)[-capacity:]
        caches = [
            KeyValueCache.empty(self._model, capacity, self._device)
            for _ in range(self._model.layers)
        ]
        generator = torch.Generator().manual_seed((settings.seed + number) % (1 << 63))
        return _Sequence(number, tokens, caches, generator, len(tokens), settings.tokens)

    def _embed_pending(self, embedding: Weights, sequence: _Sequence, capacity: int) -> None:
        """Embed the tokens that have not passed the layers.

        Positions are learnt, so a text that has reached the context cannot be shifted: its later
        half begins again at the first position.
        """
        begin = sequence.caches[0].length
        if begin + sequence.pending > capacity:
            sequence.pending = max(1, capacity // 2)
            begin = 0
            for cache in sequence.caches:
                cache.length = 0
        tokens = torch.tensor([sequence.tokens[-sequence.pending :]])
        sequence.stream = self._functions.embed(embedding, tokens, begin).to(self._device)

    def _pass_parts(self, weights: Weights, stream: Tensor, cache: KeyValueCache) -> Tensor:
        """Pass tokens through a layer, some of them at a time."""
        parts = [
            self._functions.block(weights, part, self._model, cache)
            for part in stream.split(PREFILL_CHUNK, dim=1)
        ]
        return torch.cat(parts, dim=1)

    def _load_weights(self, index: int, stays: bool = False) -> Weights:
        """Return a fragment's weights; they stay in memory if asked to, or if the budget allows."""
        weights = self._resident.get(index)
        if weights is not None:
            return weights
        fragment = self._fragments[index]
        return_freed_memory()
        weights = views(fragment, self._load(index).to(self._device))
        size = 4 * fragment.size
        if stays or size <= self._resident_bytes:
            if not stays:
                self._resident_bytes -= size
            self._resident[index] = weights
        return weights


def _choose_token(logits: Tensor, settings: SamplingSettings, generator: torch.Generator) -> int:
    """Choose the next token by nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751)."""
    logits = logits.float().cpu()
    if not math.isfinite(float(logits.sum())):
        raise StateError(DIVERGED)
    if settings.temperature <= 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / settings.temperature, -1).sort(descending=True)
    # The likeliest token stays, however small `top_p` is.
    probabilities[probabilities.cumsum(-1) - probabilities >= settings.top_p] = 0.0
    probabilities[0] = max(float(probabilities[0]), 1e-9)
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])
