"""Which versions of the protocol this program speaks, and what to do about others. Pure.

A kind of message or a required field that earlier programs do not know raises `PROTOCOL_VERSION`;
a program speaks that version and the one before. Optional fields may be added without that, as
programs ignore the fields that they do not know. tests/contract holds both rules.
"""

from collections.abc import Sequence

PROTOCOL_VERSION = 2
SPOKEN_PROTOCOLS = (PROTOCOL_VERSION, PROTOCOL_VERSION - 1)
# Kinds of messages between peers → the version that added them; all others are older.
ADDED_IN = {"signed_opinions": 2, "trial_update": 2}
UPGRADE = "install the newer one with the line on the site's page /download/"


def find_common_version(theirs: Sequence[int]) -> int | None:
    """Return the newest version that both sides speak; None without one."""
    return max(set(theirs) & set(SPOKEN_PROTOCOLS), default=None)


def describe_other_versions(theirs: Sequence[int]) -> str:
    """Return why nothing can be exchanged with a program of other versions, and what to do."""
    spoken = " and ".join(map(str, SPOKEN_PROTOCOLS))
    sentence = f"it speaks protocols {list(theirs)}, and this version {spoken}"
    if max(theirs, default=0) > PROTOCOL_VERSION:
        return f"{sentence}: this program is too old, {UPGRADE}"
    return f"{sentence}: the other program is too old, its owner can {UPGRADE}"


def is_understood(kind: str, version: int) -> bool:
    """Return whether a program that speaks this version understands a kind of message."""
    return version >= ADDED_IN.get(kind, 0)
