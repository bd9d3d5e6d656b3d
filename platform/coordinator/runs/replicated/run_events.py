"""A run's row as events of the kind "run" say it: what each of its changes tells other mirrors."""

import base64
import json
import secrets
import zlib
from collections.abc import Iterable
from typing import Any

from pydantic import Field, field_validator

from barnraise.protocol import enums, messages
from barnraise.protocol.signing import digest
from barnraise.protocol.types import Message, PlainText
from barnraise.spec import RunSpec
from coordinator.eventlog import private_data, writer
from coordinator.eventlog.projection import current_state

Said = tuple[str, dict[str, Any]]  # (type, payload)
MAX_MANIFEST_BYTES = 400_000  # bytes that a packed manifest may become


class DraftContent(Message):
    """Particulars of a run: what its owner wrote, until the launch makes it public."""

    slug: str = Field(pattern=r"^[0-9A-Za-z_-]{1,100}$")
    name: PlainText = Field(max_length=80)
    draft: dict[str, Any]

    @field_validator("draft")
    @classmethod
    def sensible(cls, draft: dict) -> dict:
        RunSpec.from_json(json.dumps(draft))
        return draft


def record_run_event(run: Any, action: str) -> None:
    """Records what `action` made of this run, whose row says so already; within `writer.log_transaction`."""
    known = current_state(f"run:{run.pk}") or {}
    writer.record(f"run.{EVENT_NAMES[action]}", run.pk, PAYLOADS[EVENT_NAMES[action]](run, known))


def creation_payload(run: Any) -> dict[str, Any]:
    return {
        "word": slug_digest(run.slug),
        "owner": str(run.owner_id),
        "parent": run.parent_id and str(run.parent_id),
        "report_every": run.report_every,
        "quorum": run.quorum,
        "created": run.created,
        "settings": draft_payload(run, {}),
        "terms": join_policy_payload(run, {}),
    }


def draft_payload(run: Any, known: dict) -> dict[str, Any]:
    fresh = secrets.token_hex(8) if known else run.pk.hex[-16:]
    before = private_data.load(known.get("about"), DraftContent)
    text = (
        known["text"]
        if before and manifest_inputs(before["draft"]) == manifest_inputs(run.draft)
        else fresh
    )
    about = private_data.store(
        f"run:{run.pk}", {"slug": run.slug, "name": run.name, "draft": run.draft}
    )
    return {"version": known.get("version", -1) + 1, "about": about, "text": text}


def slug_digest(slug: str) -> str:
    """What a draft claims: two slugs can be compared, and none be read."""
    return digest(f"run.slug {slug}")


def manifest_inputs(draft: dict) -> list:
    """What a manifest is made for."""
    return [draft["text"], draft["model"]["vocabulary"], draft["model"]["context"]]


def join_policy_payload(run: Any, known: dict) -> dict[str, Any]:
    return {
        "version": known.get("terms", {}).get("version", -1) + 1,
        "access": run.access,
        "least_memory": run.least_memory,
        "least_device_memory": run.least_device_memory,
        "team": run.team_id and str(run.team_id),
    }


def manifest_payload(run: Any, known: dict) -> dict[str, Any]:
    return {"text": known.get("text", run.pk.hex[-16:]), "packed": pack_manifest(run.manifest)}


def launch_payload(run: Any, known: dict) -> dict[str, Any]:
    pinned = {"spec": run.spec_text, "manifest": run.spec.manifest, "at": run.launched}
    return {"slug": run.slug, "name": run.name, **pinned}


def status_payload(run: Any, known: dict) -> dict[str, Any]:
    """Who resumes raises the epoch: that wins over the pause they saw."""
    resumed = (
        run.status == enums.RunStatus.TRAINING and known.get("status") == enums.RunStatus.PAUSED
    )
    when = {enums.RunStatus.TRAINING: run.started}.get(run.status, run.finished)
    return {
        "status": run.status,
        "epoch": known.get("epoch", 0) + resumed,
        "at": when or run.launched or run.created,
    }


def pack_manifest(signed: dict) -> str:
    return base64.b64encode(zlib.compress(json.dumps(signed).encode(), 9)).decode()


def unpack_manifest(text: str) -> messages.Signed | None:
    """None where it is no signed text, or one that is made to burst."""
    try:
        signed = messages.Signed.model_validate_json(
            zlib.decompressobj().decompress(base64.b64decode(text), MAX_MANIFEST_BYTES)
        )
    except (ValueError, zlib.error):
        return None
    return None if "\0" in signed.body else signed


EVENT_NAMES = {
    "edit": "edit",
    "launch": "request",
    "arrange": "arrange",
    "accept_manifest": "manifest",
    "becomes_recruiting": "launch",
    "archive": "archive",
    "unarchive": "archive",
    **dict.fromkeys(
        ("pause", "resume", "cancel", "finish", "becomes_training", "becomes_finished"), "becomes"
    ),
}  # what is done to a run → what is told of it
PAYLOADS = {
    "edit": draft_payload,
    "request": lambda run, known: {},
    "arrange": join_policy_payload,
    "manifest": manifest_payload,
    "launch": launch_payload,
    "becomes": status_payload,
    "archive": lambda run, known: {"at": run.archived},
}


def events_of_existing_run(run: Any) -> Iterable[Said]:
    """Of a run that was there before there was a log."""
    yield "run.create", creation_payload(run)
    if run.manifest:
        yield "run.manifest", manifest_payload(run, {})
    if run.launch_requested:
        yield "run.request", {}
    if run.spec_text:
        yield "run.launch", launch_payload(run, {})
    if run.started:
        yield (
            "run.status",
            {"status": enums.RunStatus.TRAINING, "epoch": 0, "at": run.started},
        )
    if run.status not in (
        enums.RunStatus.DRAFT,
        enums.RunStatus.RECRUITING,
        enums.RunStatus.TRAINING,
    ):
        yield "run.status", status_payload(run, {})
    if run.extra_tokens:
        yield "run.extend", {"tokens": run.extra_tokens}
    if run.archived:
        yield "run.archive", {"at": run.archived}
