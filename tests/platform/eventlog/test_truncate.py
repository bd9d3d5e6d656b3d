"""Test truncated logs and fork proofs, and the command that shows and mends logs."""

import pytest
from django.core.management import CommandError, call_command
from helpers.mirrors.event_log_builder import LogBuilder, rejection

from coordinator.eventlog import ingest, projection, truncate


def test_fork_proof_convinces_a_mirror_with_one_event_or_none(db, note_rows):
    liar = LogBuilder()
    second = liar.sign("note.write", "a", {"text": "to you this"})
    first = liar.append("note.write", "a", {"text": "to me that"})
    with pytest.raises(ingest.UserError, match="no mirror of the list"):
        truncate.accept_fork_proof(first, second, keys={"a" * 64})
    assert truncate.accept_fork_proof(first, second, keys={liar.identity.key})
    assert not truncate.accept_fork_proof(first, second)
    assert "ends with event 1" in rejection(*liar.events)
    assert ingest.ingest_events(liar.events[:1]).stored == 1
    assert truncate.list_fork_proofs() == [(first, second)]
    with pytest.raises(ingest.UserError, match="not two events of one origin"):
        truncate.accept_fork_proof(first, first)
    with pytest.raises(ingest.UserError, match="signature does not match"):
        truncate.accept_fork_proof(first, second.model_copy(update={"body": second.body + " "}))


def test_truncated_log_ends_with_the_last_accepted_event(db, note_rows):
    other = LogBuilder()
    for n in range(4):
        other.append("note.write", "a", {"text": str(n)})
    ingest.ingest_events(other.events[:3])
    short = projection.state_hash()
    ingest.ingest_events(other.events)
    assert truncate.truncate_log(other.origin, 3, "expelled by list 7") == 2
    assert (note_rows, projection.state_hash()) == ({"a": "1"}, short)
    assert truncate.truncate_log(other.origin, 4, "later") == 0
    assert "ends with event 3: expelled by list 7" in rejection(
        other.append("note.write", "a", {"text": "x"})
    )
    with pytest.raises(ingest.UserError, match="no log 00000000 is known here"):
        truncate.truncate_log("0" * 32, 1, "")


def test_eventlog_command_truncates_rebuilds_and_shows(db, note_rows, capsys):
    other = LogBuilder()
    other.append("note.write", "a", {"text": "one"})
    other.append("note.write", "a", {"text": "two"})
    ingest.ingest_events(other.events)
    call_command("eventlog", "truncate", other.origin, "2", "it lies")
    assert note_rows == {"a": "one"}
    note_rows.clear()
    call_command("eventlog", "rebuild")
    assert note_rows == {"a": "one"}
    call_command("eventlog", "show")
    output = capsys.readouterr().out
    assert "1 events withdrawn" in output
    assert "truncated after 2: it lies" in output
    assert projection.state_hash() in output
    with pytest.raises(CommandError, match="No log 111 is known here"):
        call_command("eventlog", "truncate", "111", "2", "who")
