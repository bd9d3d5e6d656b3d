"""The mirrors' page: what it says of each mirror, to visitors and to the staff."""

from datetime import timedelta

import pytest
from django.test import Client
from django.utils import timezone
from helpers.event_log_builder import LogBuilder
from helpers.fake_mirror import FakeMirror
from helpers.mirror_lists import list_entry, signed_list
from helpers.pages import text

from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity
from coordinator.lib import site_identity
from coordinator.replication import comparison, mirror_list, pull
from coordinator.replication.models import PeerStatus

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


@pytest.fixture
def other():
    """Build three other mirrors: an active, a silent and an expelled one."""
    made = FakeMirror(LogBuilder())
    silent = list_entry(Identity(b"s" * 32), "https://silent.example.org", "Silent <b>one</b>")
    expelled = Expulsion(at=2.0, last={}, reason="it signed two events with one number")
    gone = list_entry(Identity(b"g" * 32), "https://gone.example.org", "Gone", expelled=expelled)
    ours = list_entry(site_identity.identity(), "https://here.example.org", "Here")
    first = signed_list(3, gone, made.list_entry, silent, ours)
    mirror_list.ingest_lists([first], vouched=first.digest)
    yield made
    made.close()


def page(client: Client) -> str:
    answer = client.get("/mirrors/")
    assert answer.status_code == 200
    return text(answer)


def words() -> dict[str, str]:
    return {row.listed.name: row.status for row in comparison.compare_mirrors()}


def test_a_site_without_a_list_says_that_it_stands_alone():
    assert "This site has no mirror list" in page(Client()) and comparison.compare_mirrors() == []


def test_each_mirror_of_the_list_is_there_with_what_it_last_said(other):
    small = mirror_list.other_mirrors()[0]
    assert list(words()) == ["Here", "the small one", "Silent <b>one</b>", "Gone"]
    assert words() == {
        "Here": "here",
        "the small one": "never",
        "Silent <b>one</b>": "never",
        "Gone": "expelled",
    }
    pull.pull_from(small)
    assert words()["the small one"] == "apart", "it says 0 of its state"
    since = PeerStatus.objects.get(pk=small.key).diverged_since
    pull.pull_from(small)
    assert PeerStatus.objects.get(pk=small.key).diverged_since == since, (
        "since then, and not since now"
    )
    PeerStatus.objects.update(state_hash=comparison.local_state_hash())
    assert words()["the small one"] == "same"
    PeerStatus.objects.update(last_seen=timezone.now() - timedelta(minutes=5))
    assert words()["the small one"] == "quiet"


def test_two_that_have_come_to_one_state_are_apart_no_longer(other):
    small = mirror_list.other_mirrors()[0]
    pull.pull_from(small)
    assert PeerStatus.objects.get(pk=small.key).diverged_since
    state = comparison.local_state_hash()
    other.routes["GET /mirrors/heads"] = lambda query, who: other.identity.sign(
        "heads", other.heads(who, state=state)
    )
    pull.pull_from(small)
    assert PeerStatus.objects.get(pk=small.key).diverged_since is None


def test_mirrors_page_shows_logs_clocks_and_errors_to_staff_only(other, person):
    small = mirror_list.other_mirrors()[0]
    other.clock_offset = 30.0
    pull.pull_from(small)
    PeerStatus.objects.update(
        last_error="the small one takes more than 20 seconds for one answer and was cut off"
    )
    seen = page(Client())
    for told in (
        "the small one",
        "Silent &lt;b&gt;one",
        "Expelled",
        "it signed two events",
        "Out of sync",
        "List 3",
    ):
        assert told in seen, told
    assert "20 seconds" not in seen and other.log.origin[:12] not in seen and "Clock" not in seen
    client = Client()
    client.force_login(person("root@example.org", is_staff=True))
    seen = page(client)
    for told in ("20 seconds", other.log.origin[:12], "+30 s", "of the small one"):
        assert told in seen, told
