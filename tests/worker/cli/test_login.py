"""Test `barnraise login` against a small coordinator."""

import platform

import pytest
from helpers.effort import one_in
from helpers.worker.command_line import assert_fails, call_barnraise
from helpers.worker.fake_coordinator import MACHINE, FakeCoordinator

from barnraise.cli.site_access import describe_machine
from barnraise.planning.hardware import cpu_name
from barnraise.protocol.coordinator_messages import EnrolmentReply, EnrolmentStatus, Problem
from barnraise.state_dir import StateDir


@pytest.fixture
def coordinator():
    """Yield a coordinator that approves a code after one request and one outage."""
    coordinator = FakeCoordinator()
    statuses = iter(["pending", "outage", "approved"])

    def enrolment_status(body):
        status = next(statuses)
        if status == "outage":
            return 503, Problem(error="the site is restarting")
        machine = MACHINE if status == "approved" else None
        return EnrolmentStatus(status=status, machine=machine, person="Ida [/x]")

    coordinator.routes["POST /enrolments"] = lambda body: EnrolmentReply(
        code="ABCD-EFGH", expires=9e9, poll_every=0.2
    )
    coordinator.routes["GET /enrolments/ABCD-EFGH"] = enrolment_status
    yield coordinator
    coordinator.close()


def test_enrolment_states_the_processors_model():
    described = describe_machine("attic")
    assert described.processor == cpu_name() and described.hostname == "attic"
    assert described.processor != platform.machine()


def test_login_waits_through_an_outage_and_shows_who_approved(coordinator, tmp_path):
    result = call_barnraise(tmp_path, "login", coordinator.url)
    assert result.returncode == 0, result.stderr
    assert "ABCD-EFGH" in result.stdout and "Ida [/x]" in result.stdout
    assert StateDir(tmp_path).membership.machine == MACHINE
    assert "already" not in result.stdout
    coordinator.routes["GET /enrolments/ABCD-EFGH"] = lambda body: EnrolmentStatus(
        status="approved", machine=MACHINE
    )
    again = " ".join(call_barnraise(tmp_path, "login", coordinator.url).stdout.split())
    first_words = f"This machine is enrolled at {coordinator.url} already."
    assert again.startswith(first_words) and "enrols the same key again" in again


@pytest.mark.parametrize("status", one_in(2, ["refused", "expired"]))
def test_login_with_a_code_not_approved_saves_nothing(coordinator, tmp_path, status):
    coordinator.routes["GET /enrolments/ABCD-EFGH"] = lambda body: EnrolmentStatus(status=status)
    assert_fails(
        call_barnraise(tmp_path, "login", coordinator.url),
        f"the code was {status}: run `barnraise login` again",
    )
    assert not (tmp_path / "coordinator.json").exists()


def test_login_at_an_address_without_a_site_is_a_sentence(tmp_path):
    assert_fails(call_barnraise(tmp_path, "login", "http://127.0.0.1:9"), "does not answer")
