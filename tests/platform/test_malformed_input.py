"""Test that malformed and hostile input is refused or made harmless, and never causes a 500."""

import json
import time

import jwt
import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from django.test import Client
from helpers import paths
from helpers.site.enrolment_requests import enrolment_request

from barnraise.errors import SpecError
from barnraise.protocol import coordinator_messages, reports
from barnraise.protocol.signing import Identity
from barnraise.spec import RunSpec, preset
from coordinator.accounts.models import Enrolment
from coordinator.api import authentication
from coordinator.lib import site_identity
from coordinator.runs.drafts import NewRun
from coordinator.runs.models import Run
from coordinator.runs.spec_form import spec_from_fields
from coordinator.telemetry import report_queue
from coordinator.telemetry.history import load_history
from coordinator.telemetry.rollup import drain_queue

GOLDEN_REPORTS = paths.GOLDEN / "reports.json"
pytestmark = pytest.mark.django_db
HOSTILE_VALUES = [
    None,
    True,
    -1,
    10**30,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x" * 20_000,
    "\0",
    "\ud800",
    "‮",
    [],
    {},
    1.5,
]


@pytest.fixture
def tolerant_machine(volunteer, person):
    """Return a machine whose client returns a 500 instead of raising its cause."""
    ada = volunteer(person())
    ada.client.raise_request_exception = False
    return ada


@pytest.mark.parametrize("claim", ["aud", "htm", "htu", "body", "iat", "exp", "jti"])
def test_hostile_token_claims_are_refused(valkey, claim):
    secret = b"s" * 32
    stranger = Identity(secret)
    private_key = Ed25519PrivateKey.from_private_bytes(secret)
    now = int(time.time())
    honest = {
        "aud": site_identity.identity().key,
        "htm": "GET",
        "htu": "/api/v1/runs",
        "body": blake3(b"").hexdigest(),
    }
    honest |= {"iat": now, "exp": now + 30, "jti": "a" * 32}
    client = Client(raise_request_exception=False)
    for value in HOSTILE_VALUES:
        try:
            token = jwt.encode(
                {**honest, claim: value}, private_key, "EdDSA", headers={"kid": stranger.key}
            )
        except (TypeError, ValueError):
            continue  # the library cannot encode it
        answer = client.get("/api/v1/runs", headers={"Authorization": f"Barnraise {token}"})
        assert answer.status_code == 401, (claim, value)


def test_hostile_report_fields_cause_no_server_error(
    tolerant_machine, launched_run, numbered_report, plan, monkeypatch
):
    monkeypatch.setattr(authentication, "MAX_MACHINE_REQUESTS", 100_000)
    run, _ = launched_run(tolerant_machine.machine.owner, seed=2)
    tolerant_machine.join(run)
    honest = json.loads(
        coordinator_messages.Reports(
            reports=[numbered_report(1, plan=plan, step_seconds=5.0)]
        ).model_dump_json()
    )
    report = honest["reports"][0]
    for part in (report, report["points"][0], report["plan"]):
        for name in list(part):
            for value in HOSTILE_VALUES:
                original = part[name]
                part[name] = value
                answer = tolerant_machine.send_request(
                    "POST", f"/runs/{run.slug}/reports", sent=json.dumps(honest).encode()
                )
                part[name] = original
                assert answer.status_code in (200, 422), (name, value)
    drain_queue()


@pytest.mark.parametrize(
    "sent", [b"", b"\xff\xfe", b"[" * 900_000, b"1" * 5000, b"\0", b"null", b'{"reports": NaN}']
)
@pytest.mark.parametrize(
    "path", ["/runs/a-run/reports", "/runs/a-run/join", "/runs/a-run/manifest", "/enrolments"]
)
def test_malformed_body_is_refused(tolerant_machine, launched_run, sent, path):
    launched_run(tolerant_machine.machine.owner, seed=2)
    assert tolerant_machine.send_request("POST", path, sent=sent).status_code in (400, 422)


def test_machine_description_cannot_contain_control_characters(tolerant_machine):
    about = coordinator_messages.MachineDescription(
        hostname="pc\0‮\x1b[31m 🛖", processor="\0", cores=4
    )
    request = enrolment_request(tolerant_machine.identity, machine=about)
    answer = tolerant_machine.send_request(
        "POST", "/enrolments", tolerant_machine.identity.sign("enrolment", request)
    )
    assert answer.status_code == 200, answer.content
    assert Enrolment.objects.get().description["hostname"] == "pc   [31m 🛖"
    assert Enrolment.objects.get().description["processor"] == ""


def test_report_with_a_time_in_1970_does_not_stretch_the_chart(adas_run, numbered_report):
    run, ada = adas_run
    ada.store_reports(run, numbered_report(1, at=12.0), numbered_report(2))
    ((at, _), *more) = load_history(run)["rate"]
    assert at >= run.created.timestamp() - 10 and len(more) <= 1


def test_implausible_token_count_does_not_squeeze_the_chart(adas_run, numbered_report):
    run, ada = adas_run
    ada.report(run, *(numbered_report(seq) for seq in range(1, 41)))
    ada.store_reports(
        run,
        numbered_report(
            41, points=[reports.MeasuredLoss(kind="train", tokens=2**63 - 1, loss=1.0)]
        ),
    )
    assert [tokens for tokens, _ in load_history(run)["train"]] == [
        seq * 1000 for seq in range(1, 41)
    ]
    assert max(point["tokens"] for point in report_queue.points_since(run.pk, "0-0")[0]) == 40_000


@pytest.mark.parametrize(
    ("part", "name"),
    [("recipe", "token_budget"), ("recipe", "clip"), ("model", "width"), (None, "seed")],
)
def test_spec_with_a_huge_number_is_refused_by_field(part, name):
    raw = json.loads(RunSpec(model=preset("gpt-nano")).to_json())
    (raw[part] if part else raw)[name] = 10**400
    with pytest.raises(SpecError) as refused:
        RunSpec.from_json(json.dumps(raw))
    assert any(name in field for field in refused.value.problems)


def test_used_enrolment_code_reveals_nothing_to_others(person, client):
    code = Enrolment.open(enrolment_request(Identity(b"\x05" * 32)))
    code.approve(person())
    client.force_login(
        person("eve@example.org"), backend="allauth.account.auth_backends.AuthenticationBackend"
    )
    answer = client.get(f"/machines/enrol/{code.code}/")
    assert answer.status_code == 404 and b"barn-pc" not in answer.content


def test_revoked_machines_come_last(person, volunteer, client):
    ada = person()
    volunteer(ada, 1).machine.revoke()
    volunteer(ada, 2)
    client.force_login(ada, backend="allauth.account.auth_backends.AuthenticationBackend")
    page = client.get("/machines/").content
    assert page.index(b"pc-2") < page.index(b"pc-1")


def test_machine_that_floods_the_site_with_reports_is_throttled(volunteer, person, monkeypatch):
    """Throttle that machine only."""
    monkeypatch.setattr(authentication, "MAX_MACHINE_REQUESTS", 4)  # a join, and three reports
    owner = person()
    run = Run.create(owner, NewRun("Flood", spec_from_fields({})))
    flooding, other = volunteer(owner, 1), volunteer(owner, 2)
    for machine in (flooding, other):
        machine.join(run)
    report = reports.Report.model_validate(json.loads(GOLDEN_REPORTS.read_text())["reports"][0])
    answers = [flooding.report(run, report.model_copy(update={"seq": n})) for n in range(1, 6)]
    assert [answer.status_code for answer in answers] == [200] * 3 + [429] * 2
    assert "from this machine" in answers[-1].json()["error"]
    assert other.report(run, report).status_code == 200


@pytest.mark.parametrize("typed", ["²", "-²", "9" * 5000])
def test_digits_that_are_no_number_cause_no_server_error(signed_in, volunteer, typed):
    client, ada = signed_in()
    machine = volunteer(ada).machine
    answer = client.post(f"/machines/{machine.pk}/pause/", {"offset": typed})
    assert answer.status_code == 302
    fields = {"name": "Any", "preset": "gpt-nano", "volunteers": typed}
    assert client.post("/runs/estimate/", fields).status_code == 200
