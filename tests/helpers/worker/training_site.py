"""A site in one process on which real workers train: runs whose text this machine has already."""

import time

import torch
from example_hardware import save_example_measurement
from helpers.worker.fake_coordinator import MACHINE, FakeCoordinator, enrol
from sharded_documents import shard_documents

from barnraise.coordinator_client.client import Json
from barnraise.ledger.blob_store import BlobStore
from barnraise.protocol.coordinator_messages import (
    Directive,
    JoinReply,
    ReportReply,
    Reports,
    RunPage,
    RunView,
)
from barnraise.protocol.enums import Activity, Role, RunStatus
from barnraise.protocol.messages import Ticket
from barnraise.protocol.reports import Report
from barnraise.protocol.signing import digest
from barnraise.spec import ModelSpec, Recipe, RunSpec, TextSpec
from barnraise.state_dir import RunDir, StateDir

RUNS = {slug: f"01890000-0000-7000-8000-00000000000{n}" for n, slug in enumerate(("one", "two"), 1)}
TEXT = [b"%d: the barn needs a few more hands and a little time.\n" % n * 40 for n in range(40)]
MODEL = ModelSpec(layers=2, width=32, heads=2, context=32, vocabulary=256)
RECIPE = Recipe(
    token_budget=1_000_000_000,
    learning_rate=3e-3,
    warmup_tokens=2_000,
    step_sequences=8,
    round_steps=10,
    evaluate_every=1_000_000,
)


class TrainingSite(FakeCoordinator):
    """The site of the runs `one` and `two`, in which the machine of one home trains alone.

    Attributes:
        statuses: each run's status, by its name in addresses.
        last_reports: the machine's last report, by run.
        sessions: of the worker that sent it, by run.
        is_revoked: whether the machine has revoked itself.
    """

    def __init__(self, home: StateDir) -> None:
        super().__init__()
        self.statuses = dict.fromkeys(RUNS, RunStatus.TRAINING)
        self.last_reports: dict[str, Report] = {}
        self.sessions: dict[str, str | None] = {}
        self.is_revoked = False
        self._key = home.identity.key
        self._views = {slug: self._create_run(home, slug) for slug in RUNS}
        for slug, run in RUNS.items():
            for name in (slug, run):
                self.routes[f"GET /runs/{name}"] = lambda body, slug=slug: self._view(slug)
            self.routes[f"POST /runs/{run}/join"] = lambda body, slug=slug: self._join(slug)
            self.routes[f"POST /runs/{run}/reports"] = lambda body, slug=slug: self._receive(
                slug, body
            )
        self.routes[f"POST /machines/{MACHINE}/actions/revoke"] = self._revoke
        self.routes["GET /runs"] = lambda body: RunPage(runs=[self._view(slug) for slug in RUNS])
        enrol(home, self.url, self.identity.key)
        torch.set_num_threads(1)
        save_example_measurement(home.path / "hardware.json")

    def _create_run(self, home: StateDir, slug: str) -> RunView:
        run = RUNS[slug]
        folder = home.path / "runs" / run
        RunDir(folder, run, self._key).close()
        text = TextSpec(tokenizer="bytes")
        blobs = BlobStore(folder / "blobs")
        manifest = shard_documents(text, MODEL.vocabulary, run, blobs.store, TEXT)
        signed = self.identity.sign("manifest", manifest)
        spec = RunSpec(
            MODEL,
            text,
            RECIPE,
            seed=7,
            owner=self.identity.key,
            roots=(self.identity.key,),
            manifest=digest(signed.body),
        )
        return RunView(
            id=run,
            slug=slug,
            name=f"Run {slug}",
            status=RunStatus.TRAINING,
            spec=spec.to_json(),
            manifest=signed,
        )

    def _view(self, slug: str) -> RunView:
        return self._views[slug].model_copy(update={"status": self.statuses[slug]})

    def _sign_directive(self, slug: str):
        directive = Directive(
            run=RUNS[slug],
            machine=MACHINE,
            status=self.statuses[slug],
            report_every=0.5,
            issued=time.time(),
        )
        return self.identity.sign("directive", directive)

    def _join(self, slug: str) -> JoinReply:
        ticket = Ticket(
            run=RUNS[slug],
            peer=self._key,
            machine=MACHINE,
            volunteer=digest("Ida"),
            roles=[Role.WORKER],
            max_tokens_per_second=1 << 40,
            issued=time.time(),
            expires=time.time() + 86400,
            mirror=self.identity.key,
        )
        return JoinReply(
            run=self._view(slug),
            ticket=self.identity.sign("ticket", ticket),
            directive=self._sign_directive(slug),
            peers=[],
        )

    def _receive(self, slug: str, body: bytes) -> ReportReply:
        sent = Reports.model_validate_json(body)
        newest = sent.reports[-1]
        self.last_reports[slug] = newest
        self.sessions[slug] = sent.session
        return ReportReply(acknowledged=newest.seq, directive=self._sign_directive(slug))

    def is_training(self, slug: str, other_session: str | None = None) -> bool:
        """Return whether a worker of another session than this one has reported that it trains."""
        report = self.last_reports.get(slug)
        is_new = self.sessions.get(slug) != other_session
        return report is not None and is_new and report.activity is Activity.TRAINING

    def _revoke(self, body: bytes) -> Json:
        self.is_revoked = True
        return Json({"id": MACHINE, "name": "vm", "revoked": True})
