"""Handshakes of machines of one run, without a server or a ledger."""

from collections.abc import Callable

from helpers.updates.tickets import RUN, sign_ticket

from barnraise.peering.links.copied_keys import CopiedKeys
from barnraise.peering.links.handshake import Handshake, OwnIntroduction
from barnraise.peering.links.hole_punch_handler import StatementSigner
from barnraise.protocol.coordinator_messages import Directive
from barnraise.protocol.messages import Signed
from barnraise.protocol.run_mirrors import RunMirrors
from barnraise.protocol.signing import Identity

NOW = 10_000_000.0  # seconds since 1970
SPEC_DIGEST = "5" * 64
MIRROR, OTHER_MIRROR, EXPELLED_MIRROR = (Identity(bytes([n]) * 32) for n in (101, 102, 103))
MIRRORS = RunMirrors(
    run=RUN,
    keys=frozenset([MIRROR.key, OTHER_MIRROR.key, EXPELLED_MIRROR.key]),
    roots=frozenset([MIRROR.key]),
    expelled=frozenset([EXPELLED_MIRROR.key]),
)


def create_handshake(
    identity: Identity,
    volunteer: str = "0" * 64,
    is_excluded: Callable[[str, str], bool] = lambda key, volunteer: False,
) -> Handshake:
    """Return the handshake of a machine, whose ticket was issued at `NOW`."""
    signer = StatementSigner(identity, RUN, lambda: NOW)
    own = OwnIntroduction(
        key=identity.key,
        spec_digest=SPEC_DIGEST,
        incarnation=lambda: "1" * 16,
        addresses=lambda: ["192.0.2.1:4000"],
        sign_session=CopiedKeys(signer, lambda update: False).sign_session,
    )
    ticket = sign_ticket(MIRROR, identity.key, issued=NOW, volunteer=volunteer)
    return Handshake(own, MIRRORS, ticket, lambda: NOW, is_excluded)


def sign_directive(mirror: Identity, *revoked: str, issued: float = NOW, run: str = RUN) -> Signed:
    """Return a mirror's directive that revokes machines."""
    directive = Directive(
        run=run, machine=RUN, status="training", revoked=list(revoked), issued=issued
    )
    return mirror.sign("directive", directive)
