"""Programs of this version and of the last release read each other's messages.

`released.json` lists the messages of the last release; RELEASING.md says when it is replaced. If a
test here fails, add the field as an optional one, or raise `PROTOCOL_VERSION` and leave the message
out towards peers that do not know it.
"""

import json
from pathlib import Path

import pytest
from helpers.contract.message_shapes import describe_messages

from barnraise.protocol.versions import (
    ADDED_IN,
    PROTOCOL_VERSION,
    SPOKEN_PROTOCOLS,
    describe_other_versions,
    find_common_version,
    is_understood,
)

RELEASED = json.loads((Path(__file__).parent / "released.json").read_text())
RELEASED_PROTOCOL = 1
CURRENT = describe_messages()
# A worker from before the first release shows the address that the site sent, and so it enrols at
# no site since: the code's page must be of the origin that its owner typed.
LEFT_OUT = {("EnrolmentReply", "url")}


def test_released_messages_are_all_understood():
    assert RELEASED_PROTOCOL in SPOKEN_PROTOCOLS
    assert set(RELEASED) <= set(CURRENT), "a message of a protocol that is still spoken is gone"


@pytest.mark.parametrize("name", RELEASED)
def test_message_of_the_release_is_read_by_this_version(name):
    assert set(CURRENT[name]["required"]) <= set(RELEASED[name]["required"]), (
        "the release does not send a field that this version requires"
    )


@pytest.mark.parametrize("name", RELEASED)
def test_message_of_this_version_is_read_by_the_release(name):
    missing = set(RELEASED[name]["required"]) - set(CURRENT[name]["fields"])
    assert {(name, field) for field in missing} <= LEFT_OUT


def test_new_kinds_of_messages_between_peers_name_a_newer_protocol():
    released = {shape["kind"] for shape in RELEASED.values()}
    new = {shape["kind"] for shape in CURRENT.values()} - released
    assert {kind for kind, version in ADDED_IN.items() if version > RELEASED_PROTOCOL} == new
    assert max(ADDED_IN.values()) <= PROTOCOL_VERSION
    assert not any(is_understood(kind, RELEASED_PROTOCOL) for kind in new)


def test_two_versions_are_spoken_and_others_learn_how_to_upgrade():
    assert find_common_version([PROTOCOL_VERSION, PROTOCOL_VERSION - 1]) == PROTOCOL_VERSION
    assert find_common_version([PROTOCOL_VERSION - 1]) == PROTOCOL_VERSION - 1
    for other, sentence in (
        ([PROTOCOL_VERSION + 2, PROTOCOL_VERSION + 1], "this program is too old"),
        ([PROTOCOL_VERSION - 2], "the other program is too old"),
        ([], "the other program is too old"),
    ):
        assert find_common_version(other) is None
        described = describe_other_versions(other)
        assert sentence in described and "/download/" in described
