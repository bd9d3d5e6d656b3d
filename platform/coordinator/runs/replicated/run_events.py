"""Build the events of the aggregate type "run" from a run's row."""

import base64
import json
import secrets
import zlib
from collections.abc import Callable, Iterable
from typing import Any

from pydantic import Field, field_validator

from barnraise.protocol import enums, messages
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message, PlainText
from barnraise.spec import RunSpec
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.projection import current_state

TypeAndPayload = tuple[str, dict[str, Any]]
MAX_MANIFEST_BYTES = 400_000  # after decompression


class DraftContent(Message):
    """Private data of a run: what its owner wrote, until the launch publishes it."""

    slug: str = Field(pattern=r"^[0-9A-Za-z_-]{1,100}$")
    name: PlainText = Field(max_length=80)
    draft: dict[str, Any]

    @field_validator("draft")
    @classmethod
    def check_draft(cls, draft: dict[str, Any]) -> dict[str, Any]:
        """Refuse what is not a spec."""
        RunSpec.from_json(json.dumps(draft), is_stored=True)
        return draft


def record_run_event(run: Any, action: str) -> None:
    """Record the event of an action, a key of `EVENT_NAMES`, within `log_transaction`.

    The run's row is changed already.
    """
    name = EVENT_NAMES[action]
    state = current_state(f"run:{run.pk}") or {}
    writer.record(f"run.{name}", run.pk, PAYLOADS[name](run, state))


def creation_payload(run: Any) -> dict[str, Any]:
    """Build the payload of "run.create"."""
    return {
        "owner": str(run.owner_id),
        "parent": run.parent_id and str(run.parent_id),
        "report_every": run.report_every,
        "quorum": run.quorum,
        "created": run.created,
        "draft": draft_payload(run, {}),
        "join_policy": join_policy_payload(run, {}),
    }


def draft_payload(run: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Build the payload of "run.edit"; `text_id` changes whenever a new manifest is needed."""
    text_id = secrets.token_hex(8) if state else run.pk.hex[-16:]
    before = private_data.load(state.get("content_digest"), DraftContent)
    was_discarded = state.get("manifest") and run.manifest is None
    if (
        before
        and not was_discarded
        and manifest_inputs(before["draft"]) == manifest_inputs(run.draft)
    ):
        text_id = state["text_id"]
    content = {"slug": run.slug, "name": run.name, "draft": run.draft}
    return {
        "version": state.get("version", -1) + 1,
        "content_digest": private_data.store(f"run:{run.pk}", content),
        "text_id": text_id,
        "slug_digest": slug_digest(run.slug),
    }


def slug_digest(slug: str) -> str:
    """Return what a draft claims: mirrors can compare two slugs without reading them."""
    return digest(f"run.slug {slug}")


def manifest_inputs(draft: dict[str, Any]) -> list[Any]:
    """Return what a manifest is built from and checked against."""
    model, start = draft["model"], draft.get("start", {})
    rules = [draft["text"], model["vocabulary"], model["context"], start.get("model", "")]
    return [*rules, list(draft.get("prompts", ()))]


def join_policy_payload(run: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Build the payload of "run.set_join_policy"."""
    return {
        "version": state.get("join_policy", {}).get("version", -1) + 1,
        "access": run.access,
        "visibility": run.visibility,
        "min_memory": run.min_memory,
        "min_device_memory": run.min_device_memory,
        "team": run.team_id and str(run.team_id),
    }


def manifest_payload(run: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Build the payload of "run.post_manifest"."""
    return {
        "text_id": state.get("text_id", run.pk.hex[-16:]),
        "compressed": compress_manifest(run.manifest),
    }


def launch_payload(run: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Build the payload of "run.launch"."""
    return {
        "slug": run.slug,
        "name": run.name,
        "spec": run.spec_text,
        "manifest": run.spec.manifest,
        "at": run.launched,
    }


def status_payload(run: Any, state: dict[str, Any]) -> dict[str, Any]:
    """Build the payload of "run.change_status".

    A resume raises the epoch, so that it wins over the pause that the owner saw.
    """
    is_resumed = (
        run.status == enums.RunStatus.TRAINING and state.get("status") == enums.RunStatus.PAUSED
    )
    at = run.started if run.status == enums.RunStatus.TRAINING else run.finished
    return {
        "status": run.status,
        "epoch": state.get("epoch", 0) + is_resumed,
        "at": at or run.launched or run.created,
    }


def compress_manifest(signed: dict[str, Any]) -> str:
    """Compress a signed manifest to base 64."""
    return base64.b64encode(zlib.compress(json.dumps(signed).encode(), 9)).decode()


def decompress_manifest(text: str) -> messages.Signed | None:
    """Decompress a signed manifest; None if it is not one, or a decompression bomb."""
    try:
        data = zlib.decompressobj().decompress(base64.b64decode(text), MAX_MANIFEST_BYTES)
        signed = messages.Signed.model_validate_json(data)
    except (ValueError, zlib.error):
        return None
    return None if "\0" in signed.body else signed


EVENT_NAMES = {  # what is done to a run → the event that records it
    "edit": "edit",
    "discard_text": "edit",
    "launch": "request_launch",
    "set_join_policy": "set_join_policy",
    "accept_manifest": "post_manifest",
    "status_recruiting": "launch",
    "archive": "archive",
    "unarchive": "archive",
    "pause": "change_status",
    "resume": "change_status",
    "cancel": "change_status",
    "finish": "change_status",
    "status_training": "change_status",
    "status_finished": "change_status",
}
PAYLOADS: dict[str, Callable[[Any, dict[str, Any]], dict[str, Any]]] = {
    "edit": draft_payload,
    "request_launch": lambda run, state: {},
    "set_join_policy": join_policy_payload,
    "post_manifest": manifest_payload,
    "launch": launch_payload,
    "change_status": status_payload,
    "archive": lambda run, state: {"at": run.archived},
}


def events_of_existing_run(run: Any) -> Iterable[TypeAndPayload]:
    """Describe a run that is older than the site's log."""
    yield "run.create", creation_payload(run)
    if run.manifest:
        yield "run.post_manifest", manifest_payload(run, {})
    if run.launch_requested:
        yield "run.request_launch", {}
    if run.spec_text:
        yield "run.launch", launch_payload(run, {})
    if run.started:
        started = {"status": enums.RunStatus.TRAINING, "epoch": 0, "at": run.started}
        yield "run.change_status", started
    if run.status not in (
        enums.RunStatus.DRAFT,
        enums.RunStatus.RECRUITING,
        enums.RunStatus.TRAINING,
    ):
        yield "run.change_status", status_payload(run, {})
    if run.extra_tokens:
        yield "run.extend", {"tokens": run.extra_tokens}
    if run.archived:
        yield "run.archive", {"at": run.archived}
