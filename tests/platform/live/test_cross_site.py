"""A page of one mirror may watch a public run at another: exactly those of the list, and as nobody in particular."""

import json
import re
from html import unescape

import pytest
from asgiref.sync import sync_to_async
from django.test import Client
from helpers.mirror_lists import list_entry, signed_list
from helpers.websocket_client import SECONDS, WatcherSocket

from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity
from coordinator.lib import site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.live.cross_site import MirrorSite
from coordinator.replication import mirror_list

pytestmark = pytest.mark.django_db(transaction=True)

B = "https://b.example.org"


@pytest.fixture
def mirrors(transactional_db):
    ours = list_entry(site_identity.identity(), "https://a.example.org", "A")
    other = list_entry(Identity(b"b" * 32), f"{B}:443", "The <b>other</b>")
    first = signed_list(1, ours, other)
    mirror_list.ingest_lists([first], vouched=first.digest)
    return ours, other


def policy(answer) -> str:
    return re.search(r"connect-src ([^;]+)", answer["Content-Security-Policy"])[1]


def test_an_origin_is_spelled_as_browsers_do():
    spelled = {"https://b.example.org:443/barn": B, "http://127.0.0.1:8001": "http://127.0.0.1:8001",
               "http://B.example.org:80": "http://b.example.org", "http://[::1]:8000": "http://[::1]:8000"}  # fmt: skip
    assert {url: MirrorSite("", url, False).origin for url in spelled} == spelled
    assert MirrorSite("", B, False).allowed_sources == (B, "wss://b.example.org")


def test_csp_allows_other_mirrors_on_public_run_pages_only(
    person, launched_run, draft, mirrors, valkey
):
    owner = person()
    run, _ = launched_run(owner)
    client = Client()
    client.force_login(owner)
    page = client.get(f"/runs/{run.slug}/")
    assert policy(page) == f"'self' {B} wss://b.example.org"
    told = json.loads(unescape(re.search(r'data-mirrors="([^"]*)"', page.content.decode())[1]))
    assert [each["name"] for each in told] == ["A", "The <b>other</b>"] and told[0]["base"] == ""
    assert (
        told[1]["page"] == f"{B}:443/runs/{run.pk}/"
        and 'data-follows="true"' in page.content.decode()
    )
    alone = client.get(f"/runs/{draft(owner, name='B run').slug}/")
    assert policy(alone) == "'self'" and 'data-follows="false"' in alone.content.decode()
    assert B in unescape(alone.content.decode()), "its page there can be gone to"
    assert {policy(client.get(path)) for path in ("/", "/runs/", "/machines/")} == {"'self'"}


def test_a_site_without_a_list_knows_itself_alone(person, launched_run, valkey):
    run, _ = launched_run(person())
    page = Client().get(f"/runs/{run.slug}/")
    assert policy(page) == "'self'" and 'data-mirrors="[]"' in page.content.decode()


def test_snapshots_are_for_pages_of_mirrors_and_not_for_those_of_anybody(
    person, launched_run, draft, mirrors, valkey
):
    owner = person()
    run, _ = launched_run(owner)
    for path in (f"/live/{run.pk}/", f"/live/{run.pk}/machines/"):
        answer = Client().get(path, headers={"Origin": B})
        assert (answer.status_code, answer["Access-Control-Allow-Origin"], answer["Vary"]) == (
            200,
            B,
            "Origin",
        )
        for origin in (
            "https://evil.example",
            "null",
            "http://b.example.org",
            f"{B}.evil.example",
            "",
        ):
            answer = Client().get(path, headers={"Origin": origin} if origin else {})
            assert answer.status_code == 200 and "Access-Control-Allow-Origin" not in answer
        assert "Access-Control-Allow-Credentials" not in answer
    client, hidden = Client(), draft(owner, name="B run")
    client.force_login(owner)
    assert client.get(f"/live/{hidden.pk}/").status_code == 200
    assert client.get(f"/live/{hidden.pk}/", headers={"Origin": B}).status_code == 404


async def test_a_socket_from_another_mirrors_page_is_nobodys_in_particular(
    person, launched_run, draft, mirrors, valkey
):
    owner = await sync_to_async(person)()
    run, _ = await sync_to_async(launched_run)(owner)
    socket = await WatcherSocket(run.pk, origin=B).open()
    assert (await socket.next_frame())["run"]["status"] == "training"
    await socket.leave()
    client, hidden = Client(), await sync_to_async(draft)(owner, name="B run")
    await sync_to_async(client.force_login)(owner)
    refused = await WatcherSocket(hidden.pk, client, origin=B).open()
    assert (await refused.receive_output(SECONDS))["code"] == 4404
    for origin in ("https://evil.example", "http://[", "null", "http://a:99999999"):
        assert (await WatcherSocket(run.pk, origin=origin).connect())["type"] == "websocket.close"


async def test_an_expelled_mirrors_pages_reach_nothing_any_more(
    person, launched_run, mirrors, valkey
):
    owner = await sync_to_async(person)()
    run, _ = await sync_to_async(launched_run)(owner)
    ours, other = mirrors
    gone = other.model_copy(update={"expelled": Expulsion(at=2.0)})
    await sync_to_async(mirror_list.ingest_lists)([signed_list(2, ours, gone)])
    TtlCache.clear_all()
    assert (await WatcherSocket(run.pk, origin=B).connect())["type"] == "websocket.close"
    page = await sync_to_async(Client().get)(f"/runs/{run.slug}/")
    assert policy(page) == "'self'"
