"""Test that `barnraise privacy` names everything that this machine sends, and nothing else."""

import typing
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.contract.api_messages import API_MESSAGES
from helpers.worker.command_line import invoke
from helpers.worker.fake_coordinator import enrol

from barnraise.cli.disclosures import (
    TO_NOBODY,
    TO_OTHERS,
    TO_PEERS,
    TO_SITE,
    Disclosure,
)
from barnraise.protocol import (
    checkups,
    coordinator_messages,
    evaluation,
    messages,
    opinions,
    verdicts,
)
from barnraise.protocol.coordinator_messages import Reports
from barnraise.protocol.types import Message
from barnraise.state_dir import StateDir

# What a machine sends to a site, and the signed documents in it.
SENT_TO_SITE: tuple[type[Message], ...] = (
    coordinator_messages.EnrolmentRequest,
    coordinator_messages.InvitationToken,
    coordinator_messages.JoinRequest,
    coordinator_messages.Reports,
    coordinator_messages.AttestationStatement,
    coordinator_messages.TextManifest,
    checkups.Checkup,
    evaluation.PublishedTexts,
    evaluation.TaskScore,
    messages.Signed,
)
# What a site sends: nothing of this machine is in it.
SENT_BY_SITE: tuple[type[Message], ...] = (
    coordinator_messages.MirrorView,
    coordinator_messages.EnrolmentReply,
    coordinator_messages.EnrolmentStatus,
    coordinator_messages.WorkerRelease,
    coordinator_messages.RunView,
    coordinator_messages.RunPage,
    coordinator_messages.JoinReply,
    coordinator_messages.ReportReply,
    coordinator_messages.Problem,
)
SENT_TO_PEERS: tuple[type[Message], ...] = (
    *typing.get_args(messages.PeerMessage),
    messages.Ticket,
    messages.Update,
    messages.WorkerSession,
    messages.DialNow,
    messages.ChannelGreeting,
    messages.ChannelProof,
    verdicts.Verdict,
    opinions.SignedOpinions,
    opinions.Opinions,
)


def find_sent_fields(roots: tuple[type[Message], ...]) -> Iterator[str]:
    """Yield the fields of messages, and of those in them, as "Message.field"."""
    seen: set[type[Message]] = set()
    waiting = list(roots)
    while waiting:
        message = waiting.pop()
        if message in seen:
            continue
        seen.add(message)
        for name, field in message.model_fields.items():
            yield f"{message.__name__}.{name}"
            waiting += _find_messages(field.annotation)


def _find_messages(annotation: Any) -> Iterator[type[Message]]:
    """Yield the messages that a type names, also within lists and unions."""
    if isinstance(annotation, type) and issubclass(annotation, Message):
        yield annotation
    for part in typing.get_args(annotation):
        yield from _find_messages(part)


def list_described_fields(disclosures: tuple[Disclosure, ...]) -> Iterator[str]:
    """Yield the fields that are described, as "Message.field"."""
    for disclosure in disclosures:
        for text in ";".join(filter(None, disclosure.fields.values())).split(";"):
            message, _, fields = text.partition(":")
            yield from (f"{message.strip()}.{field}" for field in fields.split())


@pytest.mark.parametrize(
    ("disclosures", "roots"), [(TO_SITE, SENT_TO_SITE), (TO_PEERS, SENT_TO_PEERS)]
)
def test_every_field_that_is_sent_is_described_once(disclosures, roots):
    described = Counter(list_described_fields(disclosures))
    sent = set(find_sent_fields(roots))
    assert sent - described.keys() == set(), "describe these fields in cli/disclosures.py"
    assert described.keys() - sent == set(), "no message has these fields"
    assert [field for field, times in described.items() if times > 1] == []


def test_every_message_of_the_api_is_sent_by_somebody():
    assert set(API_MESSAGES) <= {*SENT_TO_SITE, *SENT_BY_SITE}
    assert not {*SENT_TO_SITE} & {*SENT_BY_SITE}


def test_new_field_and_new_message_are_found():
    class Biography(Message):
        age: int

    class LongReports(Reports):
        biographies: list[Biography] | None = None

    new = {*find_sent_fields((LongReports,))} - {*find_sent_fields((Reports,))}
    assert {"LongReports.biographies", "Biography.age"} <= new


def test_every_phrase_is_printed_and_names_the_site(tmp_path, monkeypatch):
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path / "home"))
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        output = invoke("privacy")
        words = " ".join(output.split())
        for disclosure in (*TO_SITE, *TO_PEERS):
            for phrase in (disclosure.occasion, *disclosure.fields):
                assert phrase in words
        assert (
            all(phrase in words for phrase in (*TO_OTHERS, *TO_NOBODY))
            and "To the site of a run" in output
        )
        assert max(map(len, output.splitlines())) <= int(columns)
    assert not (tmp_path / "home").exists(), "looking creates no key"
    home = StateDir(tmp_path / "home")
    enrol(home, "https://train.example.org", home.identity.key)
    assert "To https://train.example.org" in invoke("privacy")
