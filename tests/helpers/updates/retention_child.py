"""Publish into a ledger and prune it until killed.

Usage: `python retention_child.py FOLDER WORKER_ROOT`.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[2])

from barnraise.ledger.ledger import Ledger, Outcome
from barnraise.protocol import messages
from barnraise.protocol.signing import Identity

RUN = "01890000-0000-7000-8000-000000000001"
AUTHORS = [Identity(bytes([number]) * 32) for number in (1, 2)]


def publish(
    ledger: Ledger, identity: Identity, *payloads: bytes, tokens: int = 10
) -> messages.Update:
    """Append an update with these payloads to the ledger."""
    head = ledger.head(f"{identity.key}.{'0' * 16}")
    update = messages.Update(
        run=RUN,
        peer=identity.key,
        incarnation="0" * 16,
        seq=head.seq + 1,
        started_ms=0,
        time_ms=1000 * (head.seq + 1),
        ticket="0" * 64,
        previous=head.digest,
        tokens=tokens,
        total=head.total + tokens,
        fragments=[
            messages.FragmentUpdate(digest=ledger.blobs.store(p), size=len(p), sketch="0" * 16)
            for p in payloads
        ],
    )
    assert ledger.append(identity.sign("update", update), update) is Outcome.ADDED
    return update


def main() -> None:
    ledger = Ledger(Path(sys.argv[1]))
    print("open", flush=True)
    step = sum(ledger.vector().values())
    while True:
        step += 1
        publish(
            ledger,
            AUTHORS[step % 2],
            b"%d" % (step % 7) * 10,
            b"%d" % step * 10,
            b"x%d" % step * 10,
        )
        ledger.prune(1000, {author: seq - 2 for author, seq in ledger.vector().items()})


if __name__ == "__main__":
    main()
