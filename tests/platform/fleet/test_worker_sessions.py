"""A key on two machines is recognised by their sessions; a restart is not taken for a copy."""

import pytest

from barnraise.protocol.coordinator_messages import Problem, Reports
from barnraise.protocol.messages import COPIED_KEY
from coordinator.fleet.worker_sessions import ALIVE_SECONDS, is_copy

OLD, NEW = "a" * 16, "b" * 16


@pytest.mark.parametrize(
    ("old", "new", "now", "copied"),
    [
        ((0.0, 100.0), (110.0, 120.0), 120.0, False),  # the old one was killed
        ((0.0, 115.0), (110.0, 120.0), 120.0, True),
        ((0.0, 115.0), (110.0, 300.0), 115.0 + ALIVE_SECONDS, False),  # and has left since
    ],
)
def test_newer_session_is_a_copy_while_the_older_one_reports(old, new, now, copied):
    sessions = {OLD: old, NEW: new}
    assert is_copy(sessions, NEW, now) is copied
    assert not is_copy(sessions, OLD, now), "the older one goes on"


@pytest.mark.django_db
def test_second_machine_with_a_copied_key_is_refused(
    person, launched_run, volunteer, numbered_report, valkey
):
    ada = person()
    run, _ = launched_run(ada)
    machine = volunteer(ada, 2)
    machine.join(run)
    numbers = iter(range(1, 100))

    def report(session: str | None):
        sent = Reports(reports=[numbered_report(next(numbers))], session=session)
        return machine.send_request("POST", f"/runs/{run.pk}/reports", sent)

    assert report(None).status_code == 200, "an older version has no session"
    for session in (OLD, OLD, NEW, NEW):  # started again after a crash
        assert report(session).status_code == 200
    assert report(OLD).status_code == 200
    refused = report(NEW)
    assert refused.status_code == 409
    assert Problem.model_validate_json(refused.content).error == COPIED_KEY
    assert report(OLD).status_code == 200
