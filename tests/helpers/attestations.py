"""What machines say of others' updates."""

from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol.signing import digest

LIFE, NEXT = "0123456789abcdef", "fedcba9876543210"  # incarnations


def witness_of(
    machine, run, author, seq: int, total: int, life: str = LIFE, said=None
) -> coordinator_messages.Attestation:
    """That `machine` has applied another's updates up to `seq`, of so many tokens; but for what is `said` otherwise."""
    update = messages.Update(
        run=str(run.pk), peer=author.identity.key, incarnation=life, seq=seq, previous="0" * 64, tokens=1, total=total,
        fragments=[],
    )  # fmt: skip
    head = author.identity.sign("update", update)
    word = coordinator_messages.AttestationStatement(
        run=str(run.pk), author=update.author, head=digest(head.body)
    )
    word = machine.identity.sign("attestation", word.model_copy(update=said or {}))
    return coordinator_messages.Attestation(
        head=coordinator_messages.SignedHeader(**head.model_dump()),
        statement=coordinator_messages.SignedStatement(**word.model_dump()),
    )
