"""Test how pages of other listed mirrors watch a public run here, always anonymously."""

import json
import re
from html import unescape

import pytest
from asgiref.sync import sync_to_async
from django.test import Client
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.site.pages import open_client
from helpers.site.websocket_client import SECONDS, WatcherSocket

from barnraise.protocol.mirror_list import Expulsion
from barnraise.protocol.signing import Identity
from coordinator.lib import site_identity
from coordinator.lib.ttl_cache import TtlCache
from coordinator.live.cross_site import MirrorSite
from coordinator.replication import mirror_list

pytestmark = pytest.mark.django_db(transaction=True)

B = "https://b.example.org"  # the origin of the other mirror


@pytest.fixture
def mirrors(transactional_db):
    """Install a list of this site and mirror B, and return both entries."""
    own = list_entry(site_identity.identity(), "https://a.example.org", "A")
    other = list_entry(Identity(b"b" * 32), f"{B}:443", "The <b>other</b>")
    signed = signed_list(1, own, other)
    mirror_list.ingest_lists([signed], vouched=signed.digest)
    return own, other


def connect_sources(response) -> str:
    return re.search(r"connect-src ([^;]+)", response["Content-Security-Policy"])[1]


def test_mirror_site_origin_is_spelled_as_browsers_spell_it():
    origins = {
        "https://b.example.org:443/barn": B,
        "http://127.0.0.1:8001": "http://127.0.0.1:8001",
        "http://B.example.org:80": "http://b.example.org",
        "http://[::1]:8000": "http://[::1]:8000",
    }
    assert {url: MirrorSite("", url, False).origin for url in origins} == origins
    assert MirrorSite("", B, False).allowed_sources == (B, "wss://b.example.org")


def test_csp_allows_other_mirrors_on_public_run_pages_only(
    person, launched_run, draft, mirrors, valkey
):
    owner = person()
    run, _ = launched_run(owner)
    client = open_client(owner)
    page = client.get(f"/runs/{run.slug}/")
    assert connect_sources(page) == f"'self' {B} wss://b.example.org"
    html = page.content.decode()
    sites = json.loads(unescape(re.search(r'data-mirrors="([^"]*)"', html)[1]))
    assert [site["name"] for site in sites] == ["A", "The <b>other</b>"]
    assert sites[0]["base"] == "" and sites[1]["page"] == f"{B}:443/runs/{run.pk}/"
    assert 'data-failover="true"' in html
    draft_page = client.get(f"/runs/{draft(owner, name='B run').slug}/")
    html = draft_page.content.decode()
    assert connect_sources(draft_page) == "'self'" and 'data-failover="false"' in html
    assert B in unescape(html), "the page links the draft's page at the other mirror"
    assert {connect_sources(client.get(path)) for path in ("/", "/runs/", "/machines/")} == {
        "'self'"
    }


def test_run_page_without_mirror_list_connects_to_this_site_only(adas_run, valkey):
    run, _ = adas_run
    page = Client().get(f"/runs/{run.slug}/")
    assert connect_sources(page) == "'self'" and 'data-mirrors="[]"' in page.content.decode()


def test_snapshot_allows_origins_of_listed_mirrors_only(
    person, launched_run, draft, mirrors, valkey
):
    owner = person()
    run, _ = launched_run(owner)
    for path in (f"/live/{run.pk}/", f"/live/{run.pk}/machines/"):
        response = Client().get(path, headers={"Origin": B})
        assert response.status_code == 200 and response["Vary"] == "Origin"
        assert response["Access-Control-Allow-Origin"] == B
        for origin in (
            "https://evil.example",
            "null",
            "http://b.example.org",
            f"{B}.evil.example",
            "",
        ):
            response = Client().get(path, headers={"Origin": origin} if origin else {})
            assert response.status_code == 200 and "Access-Control-Allow-Origin" not in response
        assert "Access-Control-Allow-Credentials" not in response
    hidden = draft(owner, name="B run")
    client = open_client(owner)
    assert client.get(f"/live/{hidden.pk}/").status_code == 200
    assert client.get(f"/live/{hidden.pk}/", headers={"Origin": B}).status_code == 404


async def test_socket_from_page_of_another_mirror_is_anonymous(
    person, launched_run, draft, mirrors, valkey
):
    owner = await sync_to_async(person)()
    run, _ = await sync_to_async(launched_run)(owner)
    socket = await WatcherSocket(run.pk, origin=B).open()
    assert (await socket.next_frame())["run"]["status"] == "training"
    await socket.leave()
    hidden = await sync_to_async(draft)(owner, name="B run")
    client = Client()
    await sync_to_async(client.force_login)(owner)
    socket = await WatcherSocket(hidden.pk, client, origin=B).open()
    assert (await socket.receive_output(SECONDS))["code"] == 4404
    for origin in ("https://evil.example", "http://[", "null", "http://a:99999999"):
        assert (await WatcherSocket(run.pk, origin=origin).connect())["type"] == "websocket.close"


async def test_socket_from_page_of_expelled_mirror_is_refused(
    person, launched_run, mirrors, valkey
):
    owner = await sync_to_async(person)()
    run, _ = await sync_to_async(launched_run)(owner)
    own, other = mirrors
    expelled = other.model_copy(update={"expelled": Expulsion(at=2.0)})
    await sync_to_async(mirror_list.ingest_lists)([signed_list(2, own, expelled)])
    TtlCache.clear_all()
    assert (await WatcherSocket(run.pk, origin=B).connect())["type"] == "websocket.close"
    page = await sync_to_async(Client().get)(f"/runs/{run.slug}/")
    assert connect_sources(page) == "'self'"
