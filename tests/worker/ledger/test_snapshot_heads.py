"""The headers at which a snapshot stands count only if each would be accepted as an update."""

import pytest
from helpers.wait_for import wait_until

from barnraise.errors import MessageError
from barnraise.ledger.snapshot_heads import read_heads, validate_heads
from barnraise.ledger.validation import UpdateRules
from barnraise.protocol.signing import Identity, digest

RUN = "01890000-0000-7000-8000-000000000001"


def test_read_heads_refuses_unsigned_or_other_heads(world):
    a = world.machine(1).start()
    author = a.exchange.author.name
    for seed in range(2):
        a.publish_round(seed)
    newest, older = a.ledger.header(author, 2), a.ledger.header(author, 1)

    def as_json(*headers) -> bytes:
        return ("[" + ",".join(header.model_dump_json() for header in headers) + "]").encode()

    assert read_heads(as_json(newest), RUN, {author: 2})[0][1].seq == 2
    for data, run, vector in [
        (b"nonsense", RUN, {author: 2}),
        (as_json(older), RUN, {author: 2}),
        (as_json(newest, older), RUN, {author: 2}),
        (as_json(), RUN, {author: 2}),
        (as_json(newest), "01890000-0000-7000-8000-00000000000f", {author: 2}),
        (as_json(newest.model_copy(update={"signature": "0" * 128})), RUN, {author: 2}),
    ]:
        with pytest.raises(MessageError):
            read_heads(data, run, vector)


def head_of(machine, **changed):
    """Return a machine's last header, signed again with `changed` fields."""
    author = machine.exchange.author.name
    update = machine.ledger.update(author, machine.ledger.head(author).seq)
    update = update.model_copy(update=changed)
    return machine.identity.sign("update", update), update


def rules_of(world) -> UpdateRules:
    return UpdateRules.from_spec(world.spec, RUN, frozenset([world.mirror.key]))


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"total": 1 << 50}, "cannot have"),
        ({"total": 1}, "cannot have"),
        ({"tokens": 1 << 40, "total": 1 << 40}, "claims"),
        ({"fragments": []}, "fragments"),
        ({"seq": 1, "previous": "1" * 64, "total": 100}, "cannot have"),
        ({"seq": 1, "total": 150}, "cannot have"),
    ],
)
def test_head_that_no_update_could_be_is_refused(world, changed, reason):
    a, joiner = world.machine(1).start(), world.machine(2)
    for seed in range(2):
        a.publish_round(seed)
    with pytest.raises(MessageError, match=reason):
        validate_heads([head_of(a, **changed)], [a.ticket], joiner.ledger, rules_of(world))


def test_head_without_a_valid_ticket_is_refused(world):
    a, joiner = world.machine(1).start(), world.machine(2)
    a.publish_round(1)
    stranger = world.ticket(a.identity.key, by=Identity(b"s" * 32))
    changed = {"ticket": digest(stranger.body)}
    for tickets, head, reason in (
        ([], head_of(a), "without the ticket"),
        ([stranger], head_of(a), "without the ticket"),
        ([stranger], head_of(a, **changed), "not a mirror"),
    ):
        with pytest.raises(MessageError, match=reason):
            validate_heads([head], tickets, joiner.ledger, rules_of(world))
    assert validate_heads([head_of(a)], [stranger, a.ticket], joiner.ledger, rules_of(world))


def test_head_that_does_not_continue_what_is_here_is_refused(world):
    a, b = world.start_agreed(1, 2)
    rules = rules_of(world)
    for changed in (
        {"tokens": 101, "total": 101},
        {"seq": 2, "total": 200},
        {"seq": 3, "total": 1 << 30},
        {"seq": 3, "total": 300, "started_ms": 1_700_000_000_000},
    ):
        with pytest.raises(MessageError, match="in a snapshot"):
            validate_heads([head_of(a, **changed)], [a.ticket], b.ledger, rules)
    b.stop()
    a.publish_round(2)
    b.open()
    wait_until(lambda: a.ledger.head(a.exchange.author.name).seq == 2)
    assert validate_heads([head_of(a)], [a.ticket], b.ledger, rules)
