"""The mirror list: which coordinators are one site, signed by k of n keys that lie offline.

A list names a version, when it expires, its root keys and how many of them must sign, and every mirror there ever was:
one that was expelled stays in it, with the last number of each of its logs that is still believed. Machines and mirrors
carry the newest list and hand it to whoever has an older one. Whether a list takes the place of another is a pure
function of both, and each refusal is a sentence.

A chain is what leads from a list one holds to the newest: wherever the roots change, the list that changes them.
"""

from collections.abc import Sequence
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import Field, ValidationError

from barnraise.errors import MessageError, MirrorListError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, digest, open_signed
from barnraise.protocol.types import (
    Count,
    Message,
    PlainText,
    PublicKey,
    ShortText,
    Signature,
    UnixTime,
)

MAX_MIRRORS, MAX_ROOT_KEYS, MAX_LOGS_PER_MIRROR = 32, 9, 8  # of one list; and logs of one mirror
MAX_LIST_BYTES = 14_000  # bytes of a list's text
MAX_LISTS_PER_MESSAGE = 6  # lists told at once: as JSON in JSON they fit a frame's header

Url = Annotated[
    str, Field(pattern=r"^https?://[0-9A-Za-z.:\[\]_-]{1,200}(/[0-9A-Za-z._~/-]{0,100})?$")
]
Origin = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # of a mirror's log


class Expulsion(Message):
    """`last`: of each of the mirror's logs, the last event that is still believed; of one that is not named, none."""

    at: UnixTime
    last: dict[Origin, Count] = Field(default={}, max_length=MAX_LOGS_PER_MIRROR)
    reason: PlainText = Field(default="", max_length=100)


class MirrorEntry(Message):
    """A mirror: its key signs its tickets, its answers and its log."""

    key: PublicKey
    url: Url
    name: Annotated[ShortText, PlainText]
    admitted: UnixTime
    expelled: Expulsion | None = None


class MirrorList(Message):
    version: int = Field(ge=1, lt=1 << 53)
    expires: UnixTime
    threshold: int = Field(ge=1, le=MAX_ROOT_KEYS)
    roots: list[PublicKey] = Field(min_length=1, max_length=MAX_ROOT_KEYS)
    mirrors: list[MirrorEntry] = Field(min_length=1, max_length=MAX_MIRRORS)

    @property
    def active(self) -> list[MirrorEntry]:
        """Those that were not expelled."""
        return [each for each in self.mirrors if each.expelled is None]

    @property
    def keys(self) -> frozenset[str]:
        """Of every mirror there ever was: what they signed while they were in stays signed."""
        return frozenset(each.key for each in self.mirrors)

    @property
    def expelled(self) -> frozenset[str]:
        return frozenset(each.key for each in self.mirrors if each.expelled)

    def find(self, key: str) -> MirrorEntry | None:
        return next((each for each in self.mirrors if each.key == key), None)


class SignedMirrorList(Message):
    """A list's exact text, and who signed it (kind "mirror_list")."""

    body: str = Field(max_length=MAX_LIST_BYTES)
    signatures: dict[PublicKey, Signature] = Field(default={}, max_length=2 * MAX_ROOT_KEYS)

    @property
    def digest(self) -> str:
        return digest(self.body)


class MirrorLists(Message):
    """A chain, oldest first, as mirrors answer it and as peers tell it to each other."""

    type: Literal["mirror_lists"] = "mirror_lists"
    lists: list[SignedMirrorList] = Field(max_length=MAX_LISTS_PER_MESSAGE)


def parse_list(signed: SignedMirrorList) -> MirrorList:
    """What a list says, whoever signed it. Raises MirrorListError for one that contradicts itself."""
    if len(signed.body.encode()) > MAX_LIST_BYTES:
        raise MirrorListError(
            f"a mirror list of more than {MAX_LIST_BYTES:,} bytes is refused", forged=True
        )
    try:
        found = MirrorList.model_validate_json(signed.body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        raise MirrorListError(
            f"the mirror list is malformed: {where}: {first['msg'][:200]}", forged=True
        ) from None
    what = f"the mirror list {found.version}"
    for name, values in (
        ("root", found.roots),
        ("mirror", [each.key for each in found.mirrors]),
        ("address", [each.url for each in found.active]),
    ):
        if len(set(values)) < len(values):
            raise MirrorListError(f"{what} names one {name} twice", forged=True)
    if found.threshold > len(found.roots):
        raise MirrorListError(
            f"{what} asks for {found.threshold} of {len(found.roots)} roots", forged=True
        )
    if not found.active:
        raise MirrorListError(f"{what} leaves no mirror", forged=True)
    return found


def add_signature(root: Identity, signed: SignedMirrorList) -> SignedMirrorList:
    """The list with this root's signature on it as well. Raises MirrorListError where it is not one of its roots to sign."""
    word = root.sign("mirror_list", parse_list(signed))
    if word.body != signed.body:  # an unknown field, say: what is signed is what was read
        raise MirrorListError(
            "this mirror list was written by another version, which has to sign it"
        )
    return signed.model_copy(update={"signatures": {**signed.signatures, root.key: word.signature}})


def unsigned_list(found: MirrorList) -> SignedMirrorList:
    """A list that nobody has signed yet."""
    return SignedMirrorList(body=found.model_dump_json())


def verify_successor(signed: SignedMirrorList, before: MirrorList) -> MirrorList:
    """The list that takes the place of `before`, expiry apart. Raises MirrorListError with the reason why it does not."""
    found = parse_list(signed)
    if found.version < before.version:
        raise MirrorListError(
            f"the mirror list {found.version} is older than {before.version}, which is held already"
        )
    if found.version == before.version:
        raise MirrorListError(
            f"there are two different mirror lists {found.version}: the one that came first is kept"
        )
    _check_signatures(signed, found, before)
    for old in before.mirrors:
        new = found.find(old.key)
        if new is None:
            raise MirrorListError(
                f"the mirror list {found.version} says nothing of the mirror {old.key[:8]}",
                forged=True,
            )
        if old.expelled and new.expelled != old.expelled:
            raise MirrorListError(
                f"the mirror list {found.version} takes back that {old.key[:8]} was expelled: it needs a new key",
                forged=True,
            )
    return found


def verify_first(signed: SignedMirrorList, vouched: str) -> MirrorList:
    """The first list that anybody holds: its roots must have signed it, and somebody who is trusted already must have
    named its digest. Raises MirrorListError."""
    if signed.digest != vouched:
        raise MirrorListError(
            f"the mirror list {signed.digest[:8]} is not {vouched[:8]}, which this machine's mirror names"
        )
    found = parse_list(signed)
    _check_signatures(signed, found, found)
    return found


def merge_chain(
    held: Sequence[SignedMirrorList],
    told: Sequence[SignedMirrorList],
    now: float,
    vouched: str = "",
) -> list[SignedMirrorList]:
    """The chain to hold once `told` was heard: `held` itself where it says nothing new. `vouched`: the digest by which
    the very first one is known. Raises MirrorListError with the reason for what is refused; then nothing changes."""
    chain = list(held)
    current = parse_list(chain[-1]) if chain else None
    for signed in told:
        if any(signed.body == known.body for known in chain):
            continue
        if current is None:
            if told[-1].digest == vouched and signed is not told[-1]:
                continue  # who begins needs nothing of what was before
            found = verify_first(signed, vouched)
        elif signed is not told[-1] and parse_list(signed).version <= current.version:
            continue  # the way that others came
        else:
            found = verify_successor(signed, current)
        keeps = len(chain) < 2 or _turns(parse_list(chain[-2]), parse_list(chain[-1]))
        chain, current = [*(chain if keeps else chain[:-1]), signed], found
    if current is not None and chain != list(held) and now >= current.expires:
        raise MirrorListError(
            f"the mirror list {current.version} expired {(now - current.expires) / 86400:.1f} days ago"
        )
    return chain


def lists_after(chain: Sequence[SignedMirrorList], version: int) -> list[SignedMirrorList]:
    """What somebody who holds `version` needs to be told, as much as is told at once."""
    return [each for each in chain if parse_list(each).version > version][:MAX_LISTS_PER_MESSAGE]


def rank_mirrors(machine: str, mirrors: Sequence[MirrorEntry]) -> list[MirrorEntry]:
    """The mirrors in the order in which this machine prefers them: rendezvous hashing, so that machines spread evenly,
    and only those of a mirror that goes move."""
    return sorted(
        mirrors, key=lambda each: blake3(f"{machine} {each.key}".encode()).digest(), reverse=True
    )


def _turns(before: MirrorList, after: MirrorList) -> bool:
    """Whether other roots sign from here on: then whoever is behind needs this one."""
    return (set(before.roots), before.threshold) != (set(after.roots), after.threshold)


def _check_signatures(signed: SignedMirrorList, found: MirrorList, before: MirrorList) -> None:
    what = f"the mirror list {found.version}"
    for key, signature in signed.signatures.items():
        if key not in before.roots and key not in found.roots:
            raise MirrorListError(
                f"{what} is signed by {key[:8]}, a stranger to it and to the one before",
                forged=True,
            )
        try:
            open_signed(
                Signed(key=key, body=signed.body, signature=signature), "mirror_list", MirrorList
            )
        except MessageError:
            raise MirrorListError(
                f"{what}: the signature of {key[:8]} does not match", forged=True
            ) from None
    for roots, threshold, whose in (
        (before.roots, before.threshold, f"the roots of list {before.version}"),
        (found.roots, found.threshold, "its own roots"),
    ):
        signers = len(signed.signatures.keys() & set(roots))
        if signers < threshold:
            raise MirrorListError(
                f"{what} is signed by {signers} of {whose}, and {threshold} must", forged=True
            )
