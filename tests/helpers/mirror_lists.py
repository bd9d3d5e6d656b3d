"""Mirror lists for tests: roots that lie nowhere, and lists that they sign."""

from barnraise.protocol.mirror_list import MirrorEntry, MirrorList, SignedMirrorList, unsigned_list
from barnraise.protocol.signing import Identity

ROOTS = [Identity(bytes([200 + n]) * 32) for n in range(3)]
LATER = 4e9  # the same at every call: so is the list


def list_entry(identity: Identity, url: str, name: str = "a mirror", **fields) -> MirrorEntry:
    return MirrorEntry(key=identity.key, url=url, name=name, admitted=1.0, **fields)


def signed_list(
    version: int, *mirrors: MirrorEntry, signers: int = 2, expires: float = LATER
) -> SignedMirrorList:
    """Two of three roots must sign it; the first `signers` do."""
    said = MirrorList(
        version=version, expires=expires, threshold=2,
        roots=[root.key for root in ROOTS], mirrors=list(mirrors),
    )  # fmt: skip
    words = [root.sign("mirror_list", said) for root in ROOTS[:signers]]
    return unsigned_list(said).model_copy(
        update={"signatures": {word.key: word.signature for word in words}}
    )
