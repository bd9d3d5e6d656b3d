"""Texts that a run's owner publishes with it: tasks, and beginnings of documents.

They are text for people, chosen by the owner and bounded; what machines train on never passes
through a site. The event log names them by a digest, so that they can be deleted.
"""

from typing import TYPE_CHECKING, Any
from uuid import UUID

from django.db import models

from barnraise.protocol.evaluation import PreviewDocument, PublishedTexts, TaskFile, parse_tasks
from barnraise.protocol.signing import digest
from coordinator.audit.log import record
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.projection import current_state


class PublishedText(models.Model):
    """What is published with one run. `manifest` is that of the text which `preview` is of."""

    if TYPE_CHECKING:
        run_id: UUID

    run = models.OneToOneField(
        "runs.Run", on_delete=models.CASCADE, primary_key=True, related_name="published"
    )
    tasks = models.TextField(blank=True)  # one JSON object a line
    tasks_digest = models.CharField(max_length=64, blank=True)
    preview = models.JSONField(default=list)
    manifest = models.CharField(max_length=64, blank=True)

    def __str__(self) -> str:
        return f"texts of {self.run_id}"

    @classmethod
    def publish(cls, run: Any, texts: PublishedTexts, *, machine: Any = None) -> None:
        """Publish texts with a run; those that are None stay as they are."""
        with writer.log_transaction():
            row = cls.objects.filter(run=run).first() or cls(run=run)
            if texts.tasks is not None:
                row.tasks, row.tasks_digest = texts.tasks.text, digest(texts.tasks.text)
            if texts.preview is not None:
                row.preview = [document.text for document in texts.preview]
                row.manifest = digest(run.manifest["body"]) if run.manifest else ""
            row.save()
            aggregate = f"published:{run.pk}"
            content = {"tasks": row.tasks, "preview": row.preview, "manifest": row.manifest}
            named = private_data.store(aggregate, content)
            version = (current_state(aggregate) or {}).get("version", -1) + 1
            writer.record("published.set", run.pk, {"version": version, "content_digest": named})
            record("run.publish_texts", run, machine=machine)

    @classmethod
    def find(cls, run: Any) -> PublishedTexts:
        """Return what is published with a run, without a preview of an earlier text."""
        row = cls.objects.filter(run=run).first() or cls()
        is_current = bool(run.manifest) and row.manifest == digest(run.manifest["body"])
        return PublishedTexts(
            tasks=TaskFile(text=row.tasks) if row.tasks else None,
            preview=[PreviewDocument(text=text) for text in row.preview if is_current],
        )

    @classmethod
    def delete_all_of(cls, person: Any) -> None:
        """Delete what a person has published, here and at other mirrors."""
        for row in cls.objects.filter(run__owner=person):
            writer.record("published.clear", row.run_id, {})
            row.delete()

    @property
    def task_count(self) -> int:
        """How many tasks there are."""
        return len(parse_tasks(self.tasks)) if self.tasks else 0
