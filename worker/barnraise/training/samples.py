"""Write samples with the anchor at its checkpoints, for the run's page."""

import time
from collections.abc import Callable, Collection, Sequence

from barnraise.errors import TextError
from barnraise.planning.memory_model import SAMPLE_TOKENS
from barnraise.protocol.reports import SAMPLE_LENGTH, Sample, SamplesView
from barnraise.protocol.signing import digest
from barnraise.swap.sampler import SamplingSettings, TokenRange
from barnraise.text.prompt_codec import PromptCodec, make_printable
from barnraise.training.training_engine import TrainingEngine

SAMPLE_SECONDS = 5.0  # a machine writes for so long at least, if its texts are not complete before


def is_elected(key: str, neighbours: Collection[str], milestone: int) -> bool:
    """Return whether this machine writes the samples of a milestone. Pure.

    Among machines that are linked to each other it is one, and another one at the next milestone.
    """
    return key == min((key, *neighbours), key=lambda name: digest(f"{name} {milestone}"))


class SampleWriter:
    """Writes a text after each of a run's prompts. The run's owner has chosen all its files."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        tokenizer_file: bytes | None,
        vocabulary: int,
        seed: int,
    ) -> None:
        """Check the prompts and load the tokenizer.

        Args:
            prompts: tokens of each, from the run's manifest.
            tokenizer_file: content of the run's tokenizer file; None for plain bytes.
            vocabulary: of the model.
            seed: of the run, so that different machines write similarly.

        Raises:
            TextError: the run may not have such a tokenizer or such prompts.
        """
        self._codec = PromptCodec(tokenizer_file, vocabulary)
        if any(token >= vocabulary for prompt in prompts for token in prompt):
            raise TextError(f"a prompt has a token beyond the vocabulary of {vocabulary:,}")
        self._prompts = prompts
        self._settings = SamplingSettings(tokens=SAMPLE_TOKENS, seed=seed)

    def write(
        self, engine: TrainingEngine, tokens: int, seconds: float, should_stop: Callable[[], bool]
    ) -> SamplesView:
        """Write with the anchor as it is now.

        Args:
            engine: holds the anchor.
            tokens: of the ledger.
            seconds: after which the texts end where they are, unless `SAMPLE_SECONDS` is longer.
            should_stop: polled between two tokens.

        Raises:
            TextError: the tokenizer's library fails.
        """
        deadline = time.monotonic() + max(SAMPLE_SECONDS, seconds)
        texts: list[list[int]] = [[] for _ in self._prompts]
        vocabulary = TokenRange(self._codec.count, self._codec.end)
        for number, token in engine.generate(self._prompts, self._settings, vocabulary):
            texts[number].append(token)
            if time.monotonic() > deadline or should_stop():
                break
        return SamplesView(
            tokens=tokens,
            texts=[
                Sample(prompt=number, text=make_printable(self._codec.decode(text))[:SAMPLE_LENGTH])
                for number, text in enumerate(texts)
            ],
        )
