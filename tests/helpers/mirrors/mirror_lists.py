"""Sign mirror lists with root keys that exist only in tests."""

from barnraise.protocol.mirror_list import MirrorEntry, MirrorList, SignedMirrorList, unsigned_list
from barnraise.protocol.signing import Identity

ROOTS = [Identity(bytes([200 + n]) * 32) for n in range(3)]
EXPIRES = 4e9  # constant, so that every call builds the same list


def list_entry(identity: Identity, url: str, name: str = "a mirror", **fields) -> MirrorEntry:
    """Build a mirror's entry in a list."""
    return MirrorEntry(key=identity.key, url=url, name=name, admitted=1.0, **fields)


def signed_list(
    version: int,
    *mirrors: MirrorEntry,
    signers: int = 2,
    expires: float = EXPIRES,
    relays: tuple[str, ...] = (),
) -> SignedMirrorList:
    """Build a list that two of three roots must sign, signed by the first `signers`."""
    unsigned = MirrorList(
        version=version,
        expires=expires,
        threshold=2,
        roots=[root.key for root in ROOTS],
        mirrors=list(mirrors),
        relays=list(relays),
    )
    signatures = [root.sign("mirror_list", unsigned) for root in ROOTS[:signers]]
    return unsigned_list(unsigned).model_copy(
        update={"signatures": {signed.key: signed.signature for signed in signatures}}
    )
