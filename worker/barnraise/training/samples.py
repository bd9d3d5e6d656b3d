"""Write samples with the anchor at its checkpoints, for the run's page."""

import time
from collections.abc import Callable, Collection

from barnraise.planning.memory_model import SAMPLE_TOKENS, SAMPLE_WINDOW
from barnraise.protocol.reports import SAMPLE_LENGTH, Sample, SamplesView
from barnraise.protocol.signing import digest
from barnraise.swap.engine import Engine
from barnraise.swap.sampler import SamplingSettings, TokenRange
from barnraise.text.prompt_codec import PromptCodec, make_printable

SAMPLE_SECONDS = 5.0  # a machine writes for so long at least, if its texts are not complete before


def is_elected(key: str, neighbours: Collection[str], milestone: int) -> bool:
    """Return whether this machine writes the samples of a milestone. Pure.

    Among machines that are linked to each other it is one, and another one at the next milestone.
    """
    return key == min((key, *neighbours), key=lambda name: digest(f"{name} {milestone}"))


class SampleWriter:
    """Writes a text after each of a run's prompts."""

    def __init__(self, prompts: Collection[str], tokenizer_file: bytes | None, seed: int) -> None:
        """Prepare the prompts.

        Args:
            prompts: of the run's spec.
            tokenizer_file: content of the run's tokenizer file; None for plain bytes.
            seed: of the run, so that different machines write similarly.
        """
        self._codec = PromptCodec(tokenizer_file)
        self._prompts = [
            self._codec.encode(prompt)[-(SAMPLE_WINDOW - SAMPLE_TOKENS) :] for prompt in prompts
        ]
        self._settings = SamplingSettings(tokens=SAMPLE_TOKENS, seed=seed)

    def write(
        self, engine: Engine, tokens: int, seconds: float, should_stop: Callable[[], bool]
    ) -> SamplesView:
        """Write with the anchor as it is now.

        Args:
            engine: holds the anchor.
            tokens: of the ledger.
            seconds: after which the texts end where they are, unless `SAMPLE_SECONDS` is longer.
            should_stop: polled between two tokens.
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
