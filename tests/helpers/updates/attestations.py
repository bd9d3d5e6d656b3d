"""Build attestations: machines confirm that they have applied other machines' updates."""

from collections.abc import Sequence

from helpers.updates.headers import build_update

from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol.signing import Identity, digest

LIFE, NEXT = "0123456789abcdef", "fedcba9876543210"  # incarnations


def witness_of(
    machine, run, author, seq: int, total: int, life: str = LIFE
) -> coordinator_messages.Attestation:
    """Let a machine attest that it has applied another's updates.

    Args:
        machine: The machine that attests.
        run: The run.
        author: The machine that published the updates.
        seq: The number of the author's newest update.
        total: The tokens of all of the author's updates up to it.
        life: The author's incarnation.
    """
    header = sign_header(run, author, seq, total, life)
    return sign_attestation(machine.identity, header, true_statement(run, header))


def altered_witness_of(machine, run, author, changes: dict) -> coordinator_messages.Attestation:
    """Let a machine sign an attestation of two updates, with changes to its statement."""
    header = sign_header(run, author, seq=2, total=2000, life=LIFE)
    statement = true_statement(run, header).model_copy(update=changes)
    return sign_attestation(machine.identity, header, statement)


# (run, author, incarnation) → number → the last header signed with it
_chains: dict[tuple[str, str, str], dict[int, messages.Signed]] = {}


def sign_header(
    run, author, seq: int, total: int, life: str = LIFE, crew: Sequence[messages.CrewShare] = ()
) -> messages.Signed:
    """Sign the header of an author's update, which names the one before if that was signed too."""
    chain = _chains.setdefault((str(run.pk), author.identity.key, life), {})
    if seq == 1:
        previous = digest("")
    else:
        previous = digest(chain[seq - 1].body) if seq - 1 in chain else "0" * 64
    update = build_update(
        author.identity.key,
        seq,
        run=str(run.pk),
        incarnation=life,
        previous=previous,
        tokens=total if seq == 1 else 1,
        total=total,
        crew=list(crew),
    )
    chain[seq] = author.identity.sign("update", update)
    return chain[seq]


def true_statement(run, header: messages.Signed) -> coordinator_messages.AttestationStatement:
    """Return the statement that a header's update has been applied."""
    update = messages.Update.model_validate_json(header.body)
    return coordinator_messages.AttestationStatement(
        run=str(run.pk), author=update.author, head=digest(header.body)
    )


def sign_attestation(
    witness: Identity, header: messages.Signed, statement: coordinator_messages.AttestationStatement
) -> coordinator_messages.Attestation:
    signed_statement = witness.sign("attestation", statement)
    return coordinator_messages.Attestation(
        head=coordinator_messages.SignedHeader(**header.model_dump()),
        statement=coordinator_messages.SignedStatement(**signed_statement.model_dump()),
    )
