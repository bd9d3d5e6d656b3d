"""Test how a new mirror fetches the list and all logs from another one."""

import pytest
from helpers.mirrors.event_log_builder import count_stored
from helpers.mirrors.fake_mirror import FakeMirror, local_entry
from helpers.mirrors.mirror_lists import list_entry, signed_list

from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity
from coordinator.eventlog import writer
from coordinator.eventlog.models import LogEvent
from coordinator.lib import site_identity
from coordinator.lib.exceptions import UserError
from coordinator.lib.ttl_cache import TtlCache
from coordinator.replication import bootstrap, mirror_list
from coordinator.replication.models import MirrorListVersion
from coordinator.replication.protocol import LogHead, LogPart

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


@pytest.fixture
def mirror(log):
    """Yield a mirror with ten events, whose list names it and this site, which has none yet."""
    served = FakeMirror(log)
    served.lists = [signed_list(1, local_entry(), served.list_entry)]
    yield served
    served.close()


def confirm(newest, digest: str) -> bool:
    """Trust any list."""
    return True


def reason(mirror: FakeMirror, confirm=confirm) -> str:
    """Return why the mirror cannot be joined."""
    with pytest.raises(UserError) as refused:
        bootstrap.join(mirror.url, confirm, lambda line: None)
    return refused.value.sentence


def test_first_list_is_stored_only_if_a_person_confirms_its_digest(mirror, log):
    shown = []

    def refuse(newest, digest: str) -> bool:
        shown.append((newest.version, digest))
        return False

    assert reason(mirror, refuse) == "Nothing was taken over."
    assert shown == [(1, mirror.lists[0].digest)]
    assert not MirrorListVersion.objects.exists() and not LogEvent.objects.exists()
    lines = []
    assert bootstrap.join(mirror.url, confirm, lines.append).stored == 10 == count_stored(log)
    assert lines[0] == "10 events in 1 logs" and lines[1].startswith("stored 10 events")


def test_second_join_asks_nobody_and_stores_nothing_again(mirror):
    bootstrap.join(mirror.url, confirm, print)
    mirror.lists.append(signed_list(2, local_entry(), mirror.list_entry))
    again = bootstrap.join(mirror.url, lambda *_: pytest.fail("the list was confirmed"), print)
    assert (again.stored, again.refused, mirror_list.current_version()[0]) == (0, [], 2)


def test_interrupted_join_continues_after_what_is_stored(mirror, log):
    mirror.page_size = 3
    path = f"GET /mirrors/logs/{log.origin}"
    mirror.routes[path] = lambda query, who: (
        mirror.page(query, who) if int(query["after"]) < 6 else (500, b"")
    )
    assert "500" in reason(mirror)
    assert count_stored(log) == 6 and mirror_list.current_version()[0] == 1
    mirror.routes[path] = mirror.page
    assert bootstrap.join(mirror.url, confirm, print).stored == 4 and count_stored(log) == 10


def test_site_and_mirror_must_both_be_active_in_the_list(mirror):
    own_key = site_identity.identity().key
    expelled = Expulsion(at=1.0)
    other = list_entry(Identity(b"o" * 32), "https://other.example.org")
    for entries, sentence in (
        ([mirror.list_entry], f"have it added with --key {own_key}"),
        ([mirror.list_entry, local_entry(expelled=expelled)], f"--key {own_key}"),
        ([local_entry(), other], f"{mirror.identity.key[:8]}, which is not of list 1"),
        (
            [local_entry(), other, mirror.list_entry.model_copy(update={"expelled": expelled})],
            "which is not of list 1",
        ),
    ):
        MirrorListVersion.objects.all().delete()
        TtlCache.clear_all()
        mirror.lists = [signed_list(1, *entries)]
        assert sentence in reason(mirror)
        assert not LogEvent.objects.filter(origin__ours=False).exists()


def test_mirror_without_a_valid_list_is_refused(mirror):
    mirror.lists = [signed_list(1, local_entry(), mirror.list_entry, signers=1)]
    assert reason(mirror).startswith(f"{mirror.url}: the mirror list 1 is signed by 1")
    assert not MirrorListVersion.objects.exists()
    mirror.lists = []
    assert "has no mirror list" in reason(mirror)
    mirror.routes["GET /mirror"] = lambda query, who: (200, b'{"key": "nonsense"}')
    assert reason(mirror) and not LogEvent.objects.exists()


def test_restored_site_waits_until_its_own_log_is_back(mirror, note_rows):
    own_log = writer.record("note.write", "a", {"text": "x"}).origin_id
    events = writer.read_events(own_log, 0)
    writer.abandon_log(wait_for_mirrors=True)
    heads = {own_log: LogHead(seq=len(events) + 1, digest="0" * 64)}
    mirror.routes["GET /mirrors/heads"] = lambda query, who: mirror.identity.sign(
        "heads", mirror.heads(who, heads=heads)
    )
    forged = events[-1].model_copy(update={"signature": "0" * 128})
    page = LogPart(events=[forged], more=False)
    mirror.routes[f"GET /mirrors/logs/{own_log}"] = lambda query, who: page
    assert bootstrap.join(mirror.url, confirm, print).refused
    assert writer.is_restore_pending(), "it would decide without its own last decisions"
