"""Worker and site read the golden messages that they exchange."""

import json
import time
from pathlib import Path

import pytest
from django.test import Client
from helpers.network.local_server import LocalServer, QuietHandler

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.errors import CoordinatorError
from barnraise.protocol import coordinator_messages
from barnraise.protocol import reports as reports_module
from barnraise.protocol.signing import Identity
from barnraise.protocol.types import Message

GOLDEN = Path(__file__).parent / "golden"
AUTHOR, MIRROR = Identity(bytes(range(32))), Identity(bytes(range(32, 64)))
RUN = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1b"


def read_golden(name: str) -> bytes:
    return (GOLDEN / f"{name}.json").read_bytes()


# ---- the worker reads a site's answers ---------------------------------------------------------

ANSWERS = {
    ("GET", "/mirror"): "mirror_view",
    ("POST", "/enrolments"): "enrolment_reply",
    ("GET", "/enrolments/BCDF-GHJK"): "enrolment_status",
    ("GET", "/runs"): "run_page",
    ("GET", "/runs/first-barn"): "run_view",
    ("POST", f"/runs/{RUN}/join"): "join_reply",
    ("POST", f"/runs/{RUN}/manifest"): "run_view",
    ("POST", f"/runs/{RUN}/reports"): "report_reply",
    ("GET", f"/runs/{RUN}/directive"): "report_reply",
}


class GoldenHandler(QuietHandler):
    """Answers from the golden files and records the requests."""

    requests: dict[tuple[str, str], bytes] = {}

    def answer(self) -> None:
        path = self.path.removeprefix("/api/v1")
        self.requests[self.command, path] = self.rfile.read(
            int(self.headers.get("Content-Length", 0))
        )
        name = ANSWERS.get((self.command, path))
        body = read_golden(name or "problem")
        self.send_response(200 if name else 422)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    do_GET = do_POST = answer


@pytest.fixture
def coordinator():
    server = LocalServer(GoldenHandler)
    client = CoordinatorClient(server.url, AUTHOR, MIRROR.key, clock=lambda: 1_700_000_003.0)
    yield client
    client.close()
    server.close()


def test_worker_reads_every_answer_of_a_site(coordinator, monkeypatch):
    monkeypatch.setattr("barnraise.coordinator_client.client.SESSION", "0011223344556677")

    def golden(message_type: type[Message], name: str) -> Message:
        return message_type.model_validate_json(read_golden(name))

    assert coordinator.pin_mirror() == golden(coordinator_messages.MirrorView, "mirror_view")
    machine = golden(coordinator_messages.EnrolmentRequest, "enrolment_request").machine
    enrolment = golden(coordinator_messages.EnrolmentReply, "enrolment_reply")
    assert coordinator.request_enrolment(machine) == enrolment
    assert coordinator.fetch_enrolment("BCDF-GHJK").status == "approved"
    assert coordinator.fetch_runs() == golden(coordinator_messages.RunPage, "run_page")
    run = golden(coordinator_messages.RunView, "run_view")
    assert coordinator.fetch_run("first-barn") == run
    request = coordinator_messages.JoinRequest(version="1", addresses=[])
    joined = coordinator.join_run(RUN, request)
    assert joined == golden(coordinator_messages.JoinReply, "join_reply")
    manifest = golden(coordinator_messages.TextManifest, "text_manifest")
    assert coordinator.submit_manifest(RUN, manifest).slug == "first-barn"
    reports = golden(coordinator_messages.Reports, "reports")
    reply = coordinator.send_reports(
        RUN, list(reports.reports), reports.verdicts_after, reports.attestations
    )
    assert reply.acknowledged == 3
    assert coordinator.fetch_directive(RUN).acknowledged == 3
    received = GoldenHandler.requests["POST", f"/runs/{RUN}/reports"]
    assert json.loads(received) == json.loads(read_golden("reports"))
    assert coordinator.body_bytes > 0


def test_worker_turns_a_refusal_into_its_sentence(coordinator):
    with pytest.raises(
        CoordinatorError, match=r"must be divisible by its heads.*\n  model.heads: try 4"
    ):
        coordinator.fetch_run("nonsense")


# ---- the site reads a worker's requests --------------------------------------------------------


@pytest.mark.parametrize(
    "path, name, status",
    [
        ("/enrolments", "signed", 422),  # signed, but not an enrolment
        (f"/runs/{RUN}/join", "join_request", 404),  # readable, but there is no such run here
        (f"/runs/{RUN}/reports", "reports", 404),
        (f"/runs/{RUN}/manifest", "signed", 404),
        (f"/runs/{RUN}/published", "published_texts", 404),
        (f"/runs/{RUN}/scores", "task_score", 404),
    ],
)
def test_site_reads_every_request_of_a_worker(db, state, path, name, status):
    """The site reads the whole request: its answer concerns the content, never the format."""
    from coordinator.accounts.models import Machine, User
    from coordinator.lib import site_identity

    person = User.objects.create_user("ada@example.org", "wooden-barn-9")
    Machine.objects.create(key=AUTHOR.key, owner=person)
    body = read_golden(name)
    token = AUTHOR.sign_request(
        site_identity.identity().key, "POST", f"/api/v1{path}", body, time.time()
    )
    answer = Client().generic(
        "POST",
        f"/api/v1{path}",
        body,
        content_type="application/json",
        headers={"Authorization": f"Barnraise {token}"},
    )
    assert answer.status_code == status, answer.content
    problem = coordinator_messages.Problem.model_validate_json(answer.content)
    assert not {"body", "version", "reports.0", "key"} & set(problem.fields)


def test_site_describes_itself_as_in_the_golden_file(db, state):
    answer = Client().get("/api/v1/mirror").json()
    assert set(answer) == set(json.loads(read_golden("mirror_view")))


def test_live_messages_have_the_shape_that_the_page_reads(db, state):
    """The page's own tests read the same two files."""
    from coordinator.accounts.models import User
    from coordinator.live.run_snapshot import COLUMNS, RunSnapshot, build_delta, build_snapshot
    from coordinator.runs.drafts import NewRun
    from coordinator.runs.models import Run
    from coordinator.runs.spec_form import spec_from_fields

    owner = User.objects.create_user("ada@example.org", "wooden-barn-9")
    run = Run.create(owner, NewRun("First barn", spec_from_fields({})))
    snapshot = build_snapshot(run)
    delta = build_delta(None, RunSnapshot.capture(run), [])
    golden_snapshot = json.loads(read_golden("live_snapshot"))
    golden_delta = json.loads(read_golden("live_delta"))
    assert set(snapshot) == set(golden_snapshot)
    assert set(snapshot["run"]) == set(golden_snapshot["run"])
    assert list(golden_snapshot["workers"][0]) == list(COLUMNS)
    assert set(delta) <= {*golden_delta, "rate"}
    assert set(golden_delta["run"]) <= set(golden_snapshot["run"])
    for event in (*snapshot["events"], *golden_snapshot["events"], *golden_delta["events"]):
        assert set(event) == {"id", "at", "kind", "who", "what"}
    assert snapshot["events"][0]["what"] == "created the run"
    for plan in (*golden_snapshot["plans"].values(), *golden_delta["plans"].values()):
        assert reports_module.PlanView.model_validate(plan).model_dump() == plan
