"""Test the mirrors page: what it shows of each mirror to visitors and to the staff."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from helpers.mirrors.event_log_builder import LogBuilder
from helpers.mirrors.fake_mirror import FakeMirror
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.site.pages import open_client, text

from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity
from coordinator.lib import site_identity
from coordinator.replication import comparison, mirror_list, pull
from coordinator.replication.models import PeerStatus

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


@pytest.fixture
def other():
    """Build three other mirrors: an active, a silent and an expelled one."""
    active = FakeMirror(LogBuilder())
    silent = list_entry(Identity(b"s" * 32), "https://silent.example.org", "Silent <b>one</b>")
    expelled = Expulsion(at=2.0, last={}, reason="it signed two events with one number")
    gone = list_entry(Identity(b"g" * 32), "https://gone.example.org", "Gone", expelled=expelled)
    here = list_entry(site_identity.identity(), "https://here.example.org", "Here")
    signed = signed_list(3, gone, active.list_entry, silent, here)
    mirror_list.ingest_lists([signed], vouched=signed.digest)
    yield active
    active.close()


def page_text(client: Client) -> str:
    response = client.get("/mirrors/")
    assert response.status_code == 200
    return text(response)


def statuses() -> dict[str, str]:
    return {row.listed.name: row.status for row in comparison.compare_mirrors()}


def test_mirrors_page_without_mirror_list_says_so():
    assert "This site has no mirror list" in page_text(Client())
    assert comparison.compare_mirrors() == []


def test_mirror_comparison_has_status_of_each_listed_mirror(other):
    small = mirror_list.other_mirrors()[0]
    assert list(statuses()) == ["Here", "the small one", "Silent <b>one</b>", "Gone"]
    assert statuses() == {
        "Here": "here",
        "the small one": "never",
        "Silent <b>one</b>": "never",
        "Gone": "expelled",
    }
    pull.pull_from(small)
    assert statuses()["the small one"] == "same", "every event needs a moment"
    row = next(row for row in comparison.compare_mirrors() if row.listed.key == small.key)
    assert row.events_behind > 0
    PeerStatus.objects.update(diverged_since=timezone.now() - timedelta(seconds=90))
    assert statuses()["the small one"] == "apart", "it reported no state"
    since = PeerStatus.objects.get(pk=small.key).diverged_since
    pull.pull_from(small)
    diverged_since = PeerStatus.objects.get(pk=small.key).diverged_since
    assert diverged_since == since, "the second contact changes nothing"
    PeerStatus.objects.update(state_hash=comparison.local_state_hash())
    assert statuses()["the small one"] == "same"
    PeerStatus.objects.update(last_seen=timezone.now() - timedelta(minutes=5))
    assert statuses()["the small one"] == "quiet"


def test_mirror_with_equal_state_is_no_longer_out_of_sync(other):
    small = mirror_list.other_mirrors()[0]
    pull.pull_from(small)
    assert PeerStatus.objects.get(pk=small.key).diverged_since
    state = comparison.local_state_hash()
    other.routes["GET /mirrors/heads"] = lambda query, key: other.identity.sign(
        "heads", other.heads(key, state=state)
    )
    pull.pull_from(small)
    assert PeerStatus.objects.get(pk=small.key).diverged_since is None


def test_mirrors_page_shows_logs_clocks_and_errors_to_staff_only(other, person):
    small = mirror_list.other_mirrors()[0]
    other.clock_offset = 30.0
    pull.pull_from(small)
    PeerStatus.objects.update(
        diverged_since=timezone.now() - timedelta(minutes=5),
        last_error="the small one takes more than 20 seconds for one answer and was cut off",
    )
    html = page_text(Client())
    for fact in (
        "the small one",
        "Silent &lt;b&gt;one",
        "Expelled",
        "it signed two events",
        "Out of sync",
        "List 3",
    ):
        assert fact in html, fact
    for fact in ("20 seconds", other.log.origin[:12], "Clock"):
        assert fact not in html, fact
    client = open_client(person("root@example.org", is_staff=True))
    html = page_text(client)
    for fact in ("20 seconds", other.log.origin[:12], "+30 s", "of the small one"):
        assert fact in html, fact
