"""Test where pages show a crew: below its lead's row, and on the page of each member's machine."""

from datetime import timedelta

import pytest
from django.utils import timezone
from helpers.site.pages import open_client, text

from barnraise.protocol import coordinator_messages
from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.reports import CrewSeatView
from coordinator.fleet.crew_places import find_crew_place
from coordinator.fleet.models import Membership
from coordinator.telemetry.rollup import drain_queue
from coordinator.telemetry.run_table import counted_rows, machine_rows

pytestmark = pytest.mark.django_db


def seat(key: str, first: int, blocks: int, connected: bool = True) -> CrewSeatView:
    return CrewSeatView(
        key=key[:16], first_block=first, blocks=blocks, share=blocks / 5, connected=connected
    )


@pytest.fixture
def crew(person, launched_run, volunteer, numbered_report):
    """Return a run, its lead, and the machine of another person who joined the lead's crew."""
    run, lead = launched_run(person("bob@example.org", name="Bob"), seed=3)
    member = volunteer(person(name="Ada"), 1)
    assert member.request_join(run, purpose=JoinPurpose.CREW).status_code == 200
    seats = [
        seat(lead.identity.key, 1, 2),
        seat(member.identity.key, 3, 2),
        seat("9" * 64, 5, 1, connected=False),
    ]
    report = numbered_report(1, crew=seats)
    sent = coordinator_messages.Reports(reports=[report])
    assert lead.send_request("POST", f"/runs/{run.slug}/reports", sent).status_code == 200
    return run, lead, member


def test_leads_row_names_the_machines_of_its_crew(crew):
    run, lead, member = crew
    (row,) = counted_rows(machine_rows(run))
    names = [lead.machine.name, member.machine.name, "99999999"]
    assert [each["name"] for each in row["crew"]] == names
    drain_queue()
    (stored,) = counted_rows(machine_rows(run))
    assert stored["crew"] == row["crew"]
    assert row["crew"][2] == {
        "name": "99999999",
        "first_block": 5,
        "blocks": 1,
        "share": 0.2,
        "connected": False,
    }


def test_members_page_names_the_crew_while_its_lead_reports(crew):
    _, lead, member = crew
    drain_queue()
    client = open_client(member.machine.owner)
    page = text(client.get(f"/machines/{member.machine.pk}/"))
    assert f"member of the crew that {lead.machine.name} of Bob leads" in page
    assert "holds blocks 3 to 4." in page
    assert "In a crew" in page and "in a crew" in page and "ot reporting" not in page
    listed = text(client.get("/machines/"))
    assert f"In the crew of {lead.machine.name}" in listed and "Not reporting" not in listed
    assert find_crew_place(Membership.objects.get(machine=lead.machine)) is None
    long_ago = timezone.now() - timedelta(days=1)
    Membership.objects.filter(machine=lead.machine).update(last_seen=long_ago)
    page = text(client.get(f"/machines/{member.machine.pk}/"))
    assert "crew" not in page and "Not reporting" in page


def test_machine_that_did_not_join_as_member_is_in_no_crew(crew):
    _, _, member = crew
    drain_queue()
    own = Membership.objects.filter(machine=member.machine)
    assert find_crew_place(own.get())
    own.update(in_crew=False)
    assert find_crew_place(own.get()) is None
