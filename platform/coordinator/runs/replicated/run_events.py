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
BURST = 400_000  # bytes that a packed manifest may become


class Written(Message):
    """Particulars of a run: what its owner wrote, until the launch makes it public."""

    slug: str = Field(pattern=r"^[0-9A-Za-z_-]{1,100}$")
    name: PlainText = Field(max_length=80)
    draft: dict[str, Any]

    @field_validator("draft")
    @classmethod
    def sensible(cls, draft: dict) -> dict:
        RunSpec.from_json(json.dumps(draft))
        return draft


def tell(run: Any, action: str) -> None:
    """Records what `action` made of this run, whose row says so already; within `writer.log_transaction`."""
    known = current_state(f"run:{run.pk}") or {}
    writer.record(f"run.{EVENTS[action]}", run.pk, SAID[EVENTS[action]](run, known))


def created(run: Any) -> dict[str, Any]:
    return {
        "word": word(run.slug),
        "owner": str(run.owner_id),
        "parent": run.parent_id and str(run.parent_id),
        "report_every": run.report_every,
        "quorum": run.quorum,
        "created": run.created,
        "settings": settings(run, {}),
        "terms": terms(run, {}),
    }


def settings(run: Any, known: dict) -> dict[str, Any]:
    fresh = secrets.token_hex(8) if known else run.pk.hex[-16:]
    before = private_data.load(known.get("about"), Written)
    text = known["text"] if before and prepared(before["draft"]) == prepared(run.draft) else fresh
    about = private_data.store(
        f"run:{run.pk}", {"slug": run.slug, "name": run.name, "draft": run.draft}
    )
    return {"version": known.get("version", -1) + 1, "about": about, "text": text}


def word(slug: str) -> str:
    """What a draft claims: two slugs can be compared, and none be read."""
    return digest(f"run.slug {slug}")


def prepared(draft: dict) -> list:
    """What a manifest is made for."""
    return [draft["text"], draft["model"]["vocabulary"], draft["model"]["context"]]


def terms(run: Any, known: dict) -> dict[str, Any]:
    return {
        "version": known.get("terms", {}).get("version", -1) + 1,
        "access": run.access,
        "least_memory": run.least_memory,
        "least_device_memory": run.least_device_memory,
        "team": run.team_id and str(run.team_id),
    }


def manifest(run: Any, known: dict) -> dict[str, Any]:
    return {"text": known.get("text", run.pk.hex[-16:]), "packed": packed(run.manifest)}


def launched(run: Any, known: dict) -> dict[str, Any]:
    pinned = {"spec": run.spec_text, "manifest": run.spec.manifest, "at": run.launched}
    return {"slug": run.slug, "name": run.name, **pinned}


def becomes(run: Any, known: dict) -> dict[str, Any]:
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


def packed(signed: dict) -> str:
    return base64.b64encode(zlib.compress(json.dumps(signed).encode(), 9)).decode()


def unpacked(text: str) -> messages.Signed | None:
    """None where it is no signed text, or one that is made to burst."""
    try:
        signed = messages.Signed.model_validate_json(
            zlib.decompressobj().decompress(base64.b64decode(text), BURST)
        )
    except (ValueError, zlib.error):
        return None
    return None if "\0" in signed.body else signed


EVENTS = {
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
SAID = {
    "edit": settings,
    "request": lambda run, known: {},
    "arrange": terms,
    "manifest": manifest,
    "launch": launched,
    "becomes": becomes,
    "archive": lambda run, known: {"at": run.archived},
}


def whole(run: Any) -> Iterable[Said]:
    """Of a run that was there before there was a log."""
    yield "run.create", created(run)
    if run.manifest:
        yield "run.manifest", manifest(run, {})
    if run.launch_requested:
        yield "run.request", {}
    if run.spec_text:
        yield "run.launch", launched(run, {})
    if run.started:
        yield "run.becomes", {"status": enums.RunStatus.TRAINING, "epoch": 0, "at": run.started}
    if run.status not in (
        enums.RunStatus.DRAFT,
        enums.RunStatus.RECRUITING,
        enums.RunStatus.TRAINING,
    ):
        yield "run.becomes", becomes(run, {})
    if run.extra_tokens:
        yield "run.extend", {"tokens": run.extra_tokens}
    if run.archived:
        yield "run.archive", {"at": run.archived}
