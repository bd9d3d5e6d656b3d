"""Provide a run in training that tests watch."""

import pytest


@pytest.fixture
def training(person, launched_run, numbered_report, transactional_db):
    """Return (a training run, its owner's volunteer, report(seq)), with one report received."""
    run, volunteer = launched_run(person())

    def report(seq: int, **changed):
        response = volunteer.report(run, numbered_report(seq, **changed))
        assert response.status_code == 200, response.content

    report(1)
    return run, volunteer, report
