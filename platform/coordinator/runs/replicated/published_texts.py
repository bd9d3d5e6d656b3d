"""The aggregate type "published", by run: texts that its owner publishes with it."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import Field, field_validator

from barnraise.protocol.evaluation import MAX_PREVIEWS, MAX_TASK_TEXT, PREVIEW_LENGTH, TaskFile
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Digest, Message, SampleText
from coordinator.eventlog import private_data
from coordinator.eventlog.registry import AggregateType, Fact, State, require_row
from coordinator.runs.models import Run
from coordinator.runs.published_texts import PublishedText


class PublishedContent(Message):
    """Private data of a run: what its owner publishes, until they take it back."""

    tasks: SampleText = Field(max_length=MAX_TASK_TEXT)
    preview: list[Annotated[SampleText, Field(max_length=PREVIEW_LENGTH)]] = Field(
        max_length=MAX_PREVIEWS
    )
    manifest: str = Field(pattern=r"^([0-9a-f]{64})?$")

    @field_validator("tasks")
    @classmethod
    def check_tasks(cls, tasks: str) -> str:
        """Refuse a text that is no tasks."""
        return TaskFile(text=tasks).text if tasks else ""


class TextsPublished(Message):
    """The owner published texts: the highest version counts, then the latest."""

    version: int = Field(ge=0, lt=1 << 31)
    content_digest: Digest


class TextsDeleted(Message):
    """The owner deleted their account, and with it the texts."""


def fold(facts: Sequence[Fact]) -> State | None:
    """Return the newest version, or None once the texts were deleted. Pure."""
    if any(fact.action == "clear" for fact in facts):
        return None
    newest = max(facts, key=lambda fact: (fact.payload.version, fact.order_key))
    return newest.payload.model_dump()


def store(run_id: str, state: State | None) -> None:
    """Write the row of what is published, once its run and its private data are here."""
    if state is None:
        PublishedText.objects.filter(run=run_id).delete()
        return
    require_row(Run.objects.filter(pk=run_id), f"run:{run_id}")
    content = private_data.load(state["content_digest"], PublishedContent)
    if content is None:
        return
    tasks_digest = digest(content["tasks"]) if content["tasks"] else ""
    PublishedText.objects.update_or_create(
        run_id=run_id, defaults={**content, "tasks_digest": tasks_digest}
    )


AGGREGATE_TYPE = AggregateType(
    "published",
    {"set": TextsPublished, "clear": TextsDeleted},
    fold,
    store,
    private_digests=lambda state: [state["content_digest"]],
)
