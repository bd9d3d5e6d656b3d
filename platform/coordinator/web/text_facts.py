"""What a run's page shows of its prepared text: counts, never the text."""

from dataclasses import dataclass

from barnraise.protocol.coordinator_messages import TextCounts, TextManifest
from coordinator.runs.models import Run


@dataclass(frozen=True)
class TextFacts:
    """The figures of a run's text."""

    train_tokens: int  # of the training part
    held_out_tokens: int  # of the held-out part
    counts: TextCounts | None  # what was read; None if an older worker prepared the text
    asked_vocabulary: int  # what the owner asked for, if the text has fewer tokens; otherwise 0

    @property
    def tokens_per_byte(self) -> float | None:
        """Tokens per byte of the text, which make losses comparable between tokenizers.

        None where the bytes include copies that were left out, or were not counted.
        """
        if self.counts is None or not self.counts.bytes or self.counts.duplicates:
            return None
        return (self.train_tokens + self.held_out_tokens) / self.counts.bytes

    @property
    def left_out(self) -> str:
        """What of the text is not used, by its kinds; "" if all of it is."""
        if self.counts is None:
            return ""
        kinds = (
            (self.counts.duplicates, "copy", "copies"),
            (self.counts.skipped_rows, "row without text", "rows without text"),
            (self.counts.left_out, "file", "files"),
        )
        return ", ".join(
            f"{count:,} {one if count == 1 else many}" for count, one, many in kinds if count
        )


def read_text_facts(run: Run) -> TextFacts | None:
    """Return the figures of a run's text, or None while it is not prepared."""
    if run.manifest is None:
        return None
    manifest = TextManifest.model_validate_json(run.manifest["body"])
    asked = int(run.draft["model"]["vocabulary"])
    return TextFacts(
        sum(shard.tokens for shard in manifest.train),
        sum(shard.tokens for shard in manifest.held_out),
        manifest.counts,
        asked if asked > manifest.vocabulary else 0,
    )
