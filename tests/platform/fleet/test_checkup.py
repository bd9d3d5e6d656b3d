"""A machine's checkup reaches the page of its owner, and nobody else's."""

import pytest

from barnraise.protocol.checkups import Checkup, CheckupFinding
from coordinator.fleet.machine_state import MachineCheckup

pytestmark = pytest.mark.django_db


def checkup(*sentences: str) -> Checkup:
    """Return a result with one finding for each sentence."""
    findings = [CheckupFinding(subject="Peers", level="warning", sentence=s) for s in sentences]
    return Checkup(version="1.0", reach="nat", findings=findings)


def test_last_checkup_is_on_the_machines_page(signed_in, volunteer):
    browser, ada = signed_in()
    machine = volunteer(ada)
    for sentence in ("an old one", "open <UDP> 45555"):
        assert (
            machine.send_request("POST", "/machine/checkup", checkup(sentence)).status_code == 200
        )
    page = browser.get(f"/machines/{machine.machine.pk}/").content.decode()
    assert "open &lt;UDP&gt; 45555" in page and "an old one" not in page and "Checkup" in page
    assert MachineCheckup.objects.get().content["reach"] == "nat"


def test_what_could_not_be_checked_is_not_shown_as_good(signed_in, volunteer):
    browser, ada = signed_in()
    machine = volunteer(ada)
    unknown = CheckupFinding(
        subject="Reach", level="unknown", sentence="Run `barnraise doctor RUN`."
    )
    body = checkup().model_copy(update={"findings": [unknown]})
    assert machine.send_request("POST", "/machine/checkup", body).status_code == 200
    page = browser.get(f"/machines/{machine.machine.pk}/").content.decode()
    assert '<span class="chip ">Unknown</span>' in page
    assert "Run <code>barnraise doctor RUN</code>." in page and "`" not in page


def test_machine_without_a_checkup_shows_none(signed_in, volunteer):
    browser, ada = signed_in()
    page = browser.get(f"/machines/{volunteer(ada).machine.pk}/").content.decode()
    assert 'id="checkup"' not in page


def test_checkup_needs_the_machines_signature_and_bounds(signed_in, volunteer, client):
    body = checkup("x").model_dump_json()
    answer = client.post("/api/v1/machine/checkup", body, content_type="application/json")
    assert answer.status_code == 401
    _, ada = signed_in()
    many = checkup("x").model_copy(update={"findings": checkup("x").findings * 41})
    assert volunteer(ada).send_request("POST", "/machine/checkup", many).status_code == 422
    assert not MachineCheckup.objects.exists()
