"""Test what this site answers to other mirrors."""

import time

import pytest
from django.test import Client
from helpers.mirrors.fake_mirror import local_entry, pull
from helpers.mirrors.mirror_lists import signed_list
from helpers.site.machine_replies import read_directive

from barnraise.protocol import messages
from barnraise.protocol.mirror_list import MirrorLists
from barnraise.protocol.signing import Identity, digest, open_signed
from coordinator.eventlog import private_data
from coordinator.eventlog.models import PrivateData
from coordinator.lib import site_identity
from coordinator.replication import encryption, mirror_list, protocol, tasks
from coordinator.replication.models import MirrorListVersion

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]
STRANGER = Identity(b"x" * 32)


def send_request(identity: Identity, method: str, path: str, message=None, **changed):
    """Send a signed request to this site in the name of another mirror."""
    path = "/api/v1" + path
    body = b"" if message is None else message.model_dump_json().encode()
    token = changed.get("token") or identity.sign_request(
        site_identity.identity().key, method, path, body, time.time()
    )
    return Client().generic(
        method,
        path,
        body,
        content_type="application/json",
        headers={"Authorization": f"Barnraise {token}"},
    )


def test_listed_mirror_gets_heads_and_any_stored_log(fake_mirror, log):
    pull(fake_mirror)
    answer = send_request(fake_mirror.identity, "GET", "/mirrors/heads")
    heads = open_signed(
        messages.Signed.model_validate_json(answer.content),
        "heads",
        protocol.LogHeads,
        site_identity.identity().key,
    )
    assert heads.heads[log.origin].seq == 10
    assert heads.to == fake_mirror.identity.key
    assert heads.mirrors == 1
    answer = send_request(fake_mirror.identity, "GET", f"/mirrors/logs/{log.origin}?after=6&most=2")
    page = protocol.LogPart.model_validate_json(answer.content)
    assert page.events == log.events[6:8] and page.more
    page = protocol.LogPart.model_validate_json(
        send_request(fake_mirror.identity, "GET", f"/mirrors/logs/{log.origin}?after=8").content
    )
    assert page.events == log.events[8:] and not page.more


def test_log_page_is_bounded_in_bytes(fake_mirror, log, monkeypatch):
    pull(fake_mirror)
    monkeypatch.setattr("coordinator.api.replication_endpoints.protocol.PAGE_BYTES", 1000)
    page = protocol.LogPart.model_validate_json(
        send_request(fake_mirror.identity, "GET", f"/mirrors/logs/{log.origin}").content
    )
    assert 1 <= len(page.events) < 10 and page.more


@pytest.mark.parametrize(
    "query", ["after=-1", "after=x", "most=0", "most=100000", "after=99999999999999999999"]
)
def test_log_request_with_invalid_limits_is_refused(fake_mirror, log, query):
    assert (
        send_request(fake_mirror.identity, "GET", f"/mirrors/logs/{log.origin}?{query}").status_code
        == 422
    )


def test_request_of_unlisted_or_expelled_mirror_or_a_replay_is_refused(fake_mirror):
    assert Client().get("/api/v1/mirrors/heads").status_code == 401
    assert (
        "is no mirror of list 1" in send_request(STRANGER, "GET", "/mirrors/heads").json()["error"]
    )
    token = fake_mirror.identity.sign_request(
        site_identity.identity().key, "GET", "/api/v1/mirrors/heads", b"", time.time()
    )
    assert (
        send_request(fake_mirror.identity, "GET", "/mirrors/heads", token=token).status_code == 200
    )
    assert (
        "made before"
        in send_request(fake_mirror.identity, "GET", "/mirrors/heads", token=token).json()["error"]
    )
    assert (
        send_request(fake_mirror.identity, "GET", "/mirrors/fork-evidence", token=token).status_code
        == 401
    )
    mirror_list.ingest_lists([fake_mirror.sign_expulsion()])
    answer = send_request(fake_mirror.identity, "GET", "/mirrors/heads")
    assert answer.status_code == 403 and "was expelled" in answer.json()["error"]


def test_mirror_is_refused_without_a_mirror_list():
    assert send_request(STRANGER, "GET", "/mirrors/heads").status_code == 403


def test_mirror_list_and_its_predecessors_are_public(fake_mirror):
    second = signed_list(2, local_entry(), fake_mirror.list_entry)
    mirror_list.ingest_lists([second])
    served = MirrorLists.model_validate_json(Client().get("/api/v1/mirrors/list?after=1").content)
    assert served.lists == [second]
    assert (
        MirrorLists.model_validate_json(Client().get("/api/v1/mirrors/list?after=2").content).lists
        == []
    )


def test_directive_names_the_newest_mirror_list(fake_mirror, person, launched_run):
    run, machine = launched_run(person(organiser=True))
    reply = machine.join(run)
    directive = read_directive(reply)
    assert (directive.mirror_list_version, directive.mirror_list_digest) == (
        1,
        MirrorListVersion.objects.get().signed.digest,
    )


def test_private_data_is_encrypted_for_the_request(fake_mirror):
    PrivateData.objects.create(
        digest=digest("5" * 32 + "{}"), aggregate="person:x", salt="5" * 32, body="{}"
    )
    request_key, other_key = encryption.RequestKey(), encryption.RequestKey()
    request = protocol.PrivateDataRequest(digests=[digest("5" * 32 + "{}")], key=request_key.key)
    answer = send_request(fake_mirror.identity, "POST", "/mirrors/private-data", request)
    encrypted = protocol.EncryptedPrivateData.model_validate_json(answer.content)
    assert request_key.decrypt(encrypted) == [
        private_data.PrivateRecord(request.digests[0], "5" * 32, "{}")
    ]
    with pytest.raises(Exception, match="cannot be decrypted"):
        other_key.decrypt(encrypted)
    assert (
        send_request(
            fake_mirror.identity,
            "POST",
            "/mirrors/private-data",
            protocol.PrivateDataRequest.model_construct(digests=request.digests, key="0" * 64),
        ).status_code
        == 422
    )


def test_repeated_change_notices_queue_one_pull(fake_mirror, monkeypatch):
    pulled = []
    monkeypatch.setattr(tasks.pull_task, "delay", pulled.append)
    for pulls_started in range(2):
        for _ in range(3):
            assert (
                send_request(
                    fake_mirror.identity,
                    "POST",
                    "/mirrors/change-notice",
                    messages.Goodbye(reason=""),
                ).status_code
                == 200
            )
        assert pulled == [fake_mirror.identity.key] * (pulls_started + 1)
        tasks.pull_task(fake_mirror.identity.key)
