"""The mirror list: which coordinators form one site, signed by k of n offline root keys.

The scheme follows the root metadata of TUF, The Update Framework.

A list states a version, when it expires, its root keys, how many of them must sign, and every
mirror that was ever admitted: an expelled one stays in it, with the last valid number of each of
its logs. Machines and mirrors store the newest list and send it to those that have an older one.
Whether one list may succeed another is a pure function of both, and each refusal is a sentence.

A chain leads from a list that its reader already trusts to the newest one: it contains every list
that changes the root keys. Pure.
"""

from collections.abc import Collection, Sequence
from typing import Annotated, Literal

from blake3 import blake3
from pydantic import Field, ValidationError

from barnraise.errors import MessageError, MirrorListError
from barnraise.protocol.messages import Signed
from barnraise.protocol.signing import Identity, digest, open_signed
from barnraise.protocol.types import (
    Count,
    DocumentText,
    Message,
    PlainText,
    PublicKey,
    ShortText,
    Signature,
    UnixTime,
)

MAX_MIRRORS = 32  # of one list
MAX_ROOT_KEYS = 9  # of one list
MAX_LOGS_PER_MIRROR = 8
MAX_LIST_BYTES = 14_000  # of a list's text
MAX_RELAYS = 8  # of one list
DEFAULT_RELAYS = "default"  # stands for the public relays of iroh's makers
DEFAULT_RELAY_DOMAIN = ".relay.n0.iroh.link"
MAX_LISTS_PER_MESSAGE = 6  # as JSON in JSON they fit a frame's header

Url = Annotated[
    str, Field(pattern=r"^https?://[0-9A-Za-z.:\[\]_-]{1,200}(/[0-9A-Za-z._~/-]{0,100})?$")
]
# Of a relay: it forwards encrypted packets between machines that cannot reach each other.
RelayUrl = Annotated[str, Field(pattern=r"^https://[0-9A-Za-z.:\[\]_-]{1,80}/?$", max_length=90)]
Origin = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # of a mirror's log


class Expulsion(Message):
    """The expulsion of a mirror.

    `last` names the last valid event of each of the mirror's logs. In logs that it does not name,
    no event is valid.
    """

    at: UnixTime
    since: int = Field(default=1, ge=1, lt=1 << 53)  # the version of the list that first says so
    last: dict[Origin, Count] = Field(default={}, max_length=MAX_LOGS_PER_MIRROR)
    reason: PlainText = Field(default="", max_length=100)


class MirrorEntry(Message):
    """A mirror in the list. Its key signs its tickets, its answers and its log."""

    key: PublicKey
    url: Url
    name: Annotated[ShortText, PlainText]
    admitted: UnixTime
    since: int = Field(default=1, ge=1, lt=1 << 53)  # the version of the list that admitted it
    expelled: Expulsion | None = None


class MirrorList(Message):
    """The mirrors of one site, and the relays that its machines may use as a last resort."""

    version: int = Field(ge=1, lt=1 << 53)
    expires: UnixTime
    threshold: int = Field(ge=1, le=MAX_ROOT_KEYS)
    roots: list[PublicKey] = Field(min_length=1, max_length=MAX_ROOT_KEYS)
    mirrors: list[MirrorEntry] = Field(min_length=1, max_length=MAX_MIRRORS)
    relays: list[Literal["default"] | RelayUrl] = Field(default=[], max_length=MAX_RELAYS)

    @property
    def active(self) -> list[MirrorEntry]:
        """Return the mirrors that were not expelled."""
        return [mirror for mirror in self.mirrors if mirror.expelled is None]

    @property
    def keys(self) -> frozenset[str]:
        """Return the keys of all mirrors ever admitted.

        What an expelled mirror signed before its expulsion stays valid.
        """
        return frozenset(mirror.key for mirror in self.mirrors)

    @property
    def expelled(self) -> frozenset[str]:
        """Return the keys of the expelled mirrors."""
        return frozenset(mirror.key for mirror in self.mirrors if mirror.expelled)

    def signers_at(self, version: int) -> frozenset[str]:
        """Return the keys that may sign for the mirrors under list `version`.

        What an expelled mirror signs counts no longer, whatever version and date it names.
        """
        return frozenset(mirror.key for mirror in self.active if mirror.since <= version)

    def quorum_at(self, version: int) -> int:
        """Return how many mirrors must sign under list `version`: half of those active then."""
        count = sum(
            mirror.since <= version and (mirror.expelled is None or mirror.expelled.since > version)
            for mirror in self.mirrors
        )
        return quorum(count)

    def find(self, key: str) -> MirrorEntry | None:
        """Return the mirror with this key, if it is in the list."""
        return next((mirror for mirror in self.mirrors if mirror.key == key), None)


class SignedMirrorList(Message):
    """A list's exact text, with its signatures (kind "mirror_list")."""

    body: DocumentText = Field(max_length=MAX_LIST_BYTES)
    signatures: dict[PublicKey, Signature] = Field(default={}, max_length=2 * MAX_ROOT_KEYS)

    @property
    def digest(self) -> str:
        """Return the digest of the list's text."""
        return digest(self.body)


class MirrorLists(Message):
    """A chain of lists, oldest first: between peers, and in a mirror's answer."""

    type: Literal["mirror_lists"] = "mirror_lists"
    lists: list[SignedMirrorList] = Field(max_length=MAX_LISTS_PER_MESSAGE)


def is_relay_url(address: str) -> bool:
    """Return whether an address is a relay's URL, not host:port."""
    return address.startswith("https://")


def is_allowed_relay(url: str, relays: Collection[str]) -> bool:
    """Return whether a relay is one of those that a mirror list names.

    A machine may announce any URL as its relay; only these are passed on and dialled.
    """
    if _relay_host(url) in {_relay_host(relay) for relay in relays if is_relay_url(relay)}:
        return True
    is_default = _relay_host(url).endswith(DEFAULT_RELAY_DOMAIN)
    return DEFAULT_RELAYS in relays and is_relay_url(url) and is_default


def _relay_host(url: str) -> str:
    return url.removeprefix("https://").rstrip("/").rstrip(".").lower()


def quorum(mirrors: int) -> int:
    """Return how many of so many mirrors must sign what binds all machines."""
    return max(1, (mirrors + 1) // 2)


def missing_signatures(
    roots: Collection[str],
    threshold: int,
    newest: MirrorList | None,
    signers: Collection[str],
    version: int,
) -> int:
    """Return how many mirrors' signatures are missing from what binds all machines of a run.

    Args:
        roots: keys of the mirrors that launched the run.
        threshold: how many must sign at least, by the run's spec.
        newest: the newest mirror list, if the run's mirrors are in it.
        signers: keys whose signatures were verified.
        version: of the list under which they signed; 0: the run's own mirrors.
    """
    eligible = frozenset(roots)
    if newest is not None:
        eligible = (eligible - newest.expelled) | newest.signers_at(version)
        threshold = max(threshold, newest.quorum_at(version))
    return max(0, threshold - len(eligible.intersection(signers)))


def parse_list(signed: SignedMirrorList) -> MirrorList:
    """Parse a list without verifying its signatures.

    Raises:
        MirrorListError: The list is malformed or contradicts itself.
    """
    if len(signed.body.encode()) > MAX_LIST_BYTES:
        raise MirrorListError(
            f"a mirror list of more than {MAX_LIST_BYTES:,} bytes is refused", forged=True
        )
    try:
        parsed = MirrorList.model_validate_json(signed.body)
    except ValidationError as error:
        first_error = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first_error["loc"])) or "it"
        raise MirrorListError(
            f"the mirror list is malformed: {where}: {first_error['msg'][:200]}", forged=True
        ) from None
    title = f"the mirror list {parsed.version}"
    for name, values in (
        ("root", parsed.roots),
        ("mirror", [mirror.key for mirror in parsed.mirrors]),
        ("address", [mirror.url for mirror in parsed.active]),
    ):
        if len(set(values)) < len(values):
            raise MirrorListError(f"{title} names one {name} twice", forged=True)
    if parsed.threshold > len(parsed.roots):
        raise MirrorListError(
            f"{title} asks for {parsed.threshold} of {len(parsed.roots)} roots", forged=True
        )
    if not parsed.active:
        raise MirrorListError(f"{title} leaves no mirror", forged=True)
    return parsed


def add_signature(root: Identity, signed: SignedMirrorList) -> SignedMirrorList:
    """Return the list with this root key's signature added.

    Raises:
        MirrorListError: The list has fields that this version does not know: signing would drop
        them.
    """
    signature = root.sign("mirror_list", parse_list(signed))
    if signature.body != signed.body:
        raise MirrorListError(
            "this mirror list was written by another version, which has to sign it"
        )
    signatures = {**signed.signatures, root.key: signature.signature}
    return signed.model_copy(update={"signatures": signatures})


def unsigned_list(mirrors: MirrorList) -> SignedMirrorList:
    """Return the list's text without any signature."""
    return SignedMirrorList(body=mirrors.model_dump_json())


def verify_successor(signed: SignedMirrorList, current: MirrorList) -> MirrorList:
    """Return the list if it may succeed `current`. Its expiry is not checked.

    Raises:
        MirrorListError: It may not; the text says why.
    """
    successor = parse_list(signed)
    if successor.version < current.version:
        raise MirrorListError(
            f"the mirror list {successor.version} is older than {current.version}, "
            "which is held already"
        )
    if successor.version == current.version:
        raise MirrorListError(
            f"there are two different mirror lists {successor.version}: "
            "the one that came first is kept"
        )
    _verify_signatures(signed, successor, current)
    for old in current.mirrors:
        new = successor.find(old.key)
        if new is None:
            raise MirrorListError(
                f"the mirror list {successor.version} says nothing of the mirror {old.key[:8]}",
                forged=True,
            )
        if old.expelled and new.expelled != old.expelled:
            raise MirrorListError(
                f"the mirror list {successor.version} takes back that {old.key[:8]} was expelled: "
                "it needs a new key",
                forged=True,
            )
    return successor


def verify_first(signed: SignedMirrorList, trusted_digest: str) -> MirrorList:
    """Return the list if it may be the first that a machine or mirror stores.

    Its own roots must have signed it, and a trusted party must have named its digest.

    Raises:
        MirrorListError: It may not; the text says why.
    """
    if signed.digest != trusted_digest:
        raise MirrorListError(
            f"the mirror list {signed.digest[:8]} is not {trusted_digest[:8]}, "
            "which this machine's mirror names"
        )
    mirrors = parse_list(signed)
    _verify_signatures(signed, mirrors, mirrors)
    return mirrors


def merge_chain(
    stored: Sequence[SignedMirrorList],
    received: Sequence[SignedMirrorList],
    now: float,
    trusted_digest: str = "",
) -> list[SignedMirrorList]:
    """Return the chain to store after `received` has come: `stored` itself if nothing is new.

    Args:
        stored: the chain so far; may be empty.
        received: a chain, oldest first.
        now: seconds since 1970.
        trusted_digest: of the first list, for a reader that has none yet.

    Raises:
        MirrorListError: A received list is refused. Then nothing changes.
    """
    chain = list(stored)
    current = parse_list(chain[-1]) if chain else None
    for signed in received:
        is_last = signed is received[-1]
        if any(signed.body == member.body for member in chain):
            continue
        if current is None:
            if received[-1].digest == trusted_digest and not is_last:
                continue  # a reader that trusts the newest list needs none of the older ones
            successor = verify_first(signed, trusted_digest)
        elif not is_last and parse_list(signed).version <= current.version:
            continue  # older lists of the sender's chain
        else:
            successor = verify_successor(signed, current)
        # Replace the last list, unless it changed the roots: then the chain needs it.
        changed_roots = len(chain) < 2 or _roots_differ(
            parse_list(chain[-2]), parse_list(chain[-1])
        )
        chain = [*(chain if changed_roots else chain[:-1]), signed]
        current = successor
    if current is not None and chain != list(stored) and now >= current.expires:
        days = (now - current.expires) / 86400
        raise MirrorListError(f"the mirror list {current.version} expired {days:.1f} days ago")
    return chain


def lists_after(chain: Sequence[SignedMirrorList], version: int) -> list[SignedMirrorList]:
    """Return the lists that a reader at `version` needs, at most one message's worth."""
    newer = [signed for signed in chain if parse_list(signed).version > version]
    return newer[:MAX_LISTS_PER_MESSAGE]


def rank_mirrors(machine: str, mirrors: Sequence[MirrorEntry]) -> list[MirrorEntry]:
    """Sort the mirrors by this machine's preference.

    Rendezvous hashing spreads machines evenly; when a mirror goes, only its machines move.
    """
    return sorted(
        mirrors,
        key=lambda mirror: blake3(f"{machine} {mirror.key}".encode()).digest(),
        reverse=True,
    )


def _roots_differ(before: MirrorList, after: MirrorList) -> bool:
    return (set(before.roots), before.threshold) != (set(after.roots), after.threshold)


def _verify_signatures(signed: SignedMirrorList, mirrors: MirrorList, current: MirrorList) -> None:
    """Verify every signature, and that enough roots of both lists have signed.

    Raises:
        MirrorListError: A signature is wrong or missing.
    """
    title = f"the mirror list {mirrors.version}"
    for key, signature in signed.signatures.items():
        if key not in current.roots and key not in mirrors.roots:
            raise MirrorListError(
                f"{title} is signed by {key[:8]}, a stranger to it and to the one before",
                forged=True,
            )
        try:
            single = Signed(key=key, body=signed.body, signature=signature)
            open_signed(single, "mirror_list", MirrorList)
        except MessageError:
            raise MirrorListError(
                f"{title}: the signature of {key[:8]} does not match", forged=True
            ) from None
    for roots, threshold, whose in (
        (current.roots, current.threshold, f"the roots of list {current.version}"),
        (mirrors.roots, mirrors.threshold, "its own roots"),
    ):
        signers = len(signed.signatures.keys() & set(roots))
        if signers < threshold:
            raise MirrorListError(
                f"{title} is signed by {signers} of {whose}, and {threshold} must", forged=True
            )
