"""Examples of everything that a page shows; `create_examples` runs in a process of the site.

Two people, four machines that reported for a day, a fifth one in the crew of the first, an active
run, a finished one, a draft; a team, invitations, a token, a webhook, notifications, an
announcement. Names contain what a page must be able to show: markup, right-to-left text, emoji, and
many characters.
"""

import json
import math
import random
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from django.core import signing
from django.db import transaction
from helpers.paths import GOLDEN
from helpers.updates.attestations import sign_attestation, true_statement
from helpers.updates.headers import build_update

from barnraise.protocol import coordinator_messages
from barnraise.protocol import reports as reports_module
from barnraise.protocol.enums import JoinPurpose
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts.models import Enrolment, Machine, Team, TeamInvitation, User
from coordinator.audit.models import AuditEntry
from coordinator.eventlog.models import Origin
from coordinator.fleet.join import admit_machine
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.marked_names import mark_name
from coordinator.fleet.models import Membership
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.fleet.verdict_requests import RetractionRequest
from coordinator.lib import site_identity
from coordinator.notify.models import Notification, Webhook
from coordinator.notify.notification_types import NotificationDraft, NotificationType
from coordinator.notify.tasks import UNSUBSCRIBE
from coordinator.runs import models as runs
from coordinator.runs.join_policy import Access, JoinPolicy
from coordinator.runs.spec_form import spec_from_fields
from coordinator.staff.models import Announcement
from coordinator.telemetry import rollup
from coordinator.tokens.models import Token

REPORT = coordinator_messages.Reports.model_validate_json(
    (GOLDEN / "reports.json").read_text()
).reports[0]
HARDWARE = coordinator_messages.JoinRequest.model_validate_json(
    (GOLDEN / "join_request.json").read_text()
).hardware
HOSTILE_NAME = "Jonas <b>Weber</b> \u202eof the mill 🪵"
NOTES = """# Why

To *see* whether it works.

| width | loss |
|---|---|
| 128 | 3.1 |

<script>alert(1)</script>"""
DAY_SECONDS = 86_400
REPORT_SECONDS = 600.0
REPORTS_A_DAY = 144
TOKENS_PER_REPORT = 60_000  # by all machines together
LEDGER_TOKENS = REPORTS_A_DAY * TOKENS_PER_REPORT
TOKEN_SHARES = (0.4, 0.3, 0.2, 0.1)  # of the machines
TODAY = time.time()
random_numbers = random.Random(5)


@dataclass(frozen=True)
class ActiveRun:
    """A run in training with its machines, their keys and their memberships, in one order.

    The first machine leads a crew, with another machine of its owner and one that is gone.
    """

    run: runs.Run
    machines: list[Machine]
    identities: list[Identity]
    members: list[Membership]
    crew: list[reports_module.CrewSeatView]
    crew_machine: Machine


def create_machine(owner: User, name: str, seed: int) -> tuple[Machine, Identity]:
    identity = Identity(bytes([seed]) * 32)
    machine = Machine.objects.create(
        key=identity.key,
        owner=owner,
        hostname=name,
        system="Linux 6.8",
        processor="Ryzen 7 7840U",
        cores=16,
        memory_bytes=32 << 30,
    )
    return machine, identity


def create_launched_run(
    owner: User, name: str, signer: Identity, report_every: float = REPORT_SECONDS, **fields: str
) -> runs.Run:
    """Create a run that was launched a day ago and whose text is prepared.

    Args:
        owner: The run's owner.
        name: The run's name.
        signer: The key of the machine that prepared the text.
        report_every: Seconds between two reports of a machine.
        fields: Fields of the run's form that differ from its defaults.
    """
    new_run = runs.NewRun(name, spec_from_fields(fields), report_every=report_every)
    run = runs.Run.create(owner, new_run)
    manifest = coordinator_messages.TextManifest(
        run=str(run.pk),
        vocabulary=run.spec.model.vocabulary,
        tokenizer=digest("t"),
        train=[coordinator_messages.Shard(digest=digest("a"), tokens=9_000)],
        held_out=[coordinator_messages.Shard(digest=digest("b"), tokens=900)],
    )
    run.launch(actor=owner)
    run.accept_manifest(
        signer.sign("manifest", manifest), machine=Machine.objects.get(key=signer.key)
    )
    created = datetime.fromtimestamp(TODAY - DAY_SECONDS, UTC)
    runs.Run.objects.filter(pk=run.pk).update(created=created)
    run.refresh_from_db()
    return run


def noisy_loss(tokens: float) -> float:
    return 2.1 + 5.4 * math.exp(-tokens / 700_000) + random_numbers.gauss(0, 0.04)


def measured_losses(ledger_tokens: int, with_validation: bool) -> list[reports_module.MeasuredLoss]:
    """Return the losses that one report contains."""
    losses = [
        reports_module.MeasuredLoss(
            kind="train",
            tokens=ledger_tokens - quarter * TOKENS_PER_REPORT // 4,
            loss=noisy_loss(ledger_tokens),
        )
        for quarter in (3, 2, 1, 0)
    ]
    if with_validation:
        losses.append(
            reports_module.MeasuredLoss(
                kind="validation", tokens=ledger_tokens, loss=noisy_loss(ledger_tokens) + 0.1
            )
        )
    return losses


def store_reports_of_a_day(member: Membership, share: float, **newest) -> None:
    """Store a report every ten minutes; `newest` are fields of the newest report."""
    reports = []
    for seq in range(1, REPORTS_A_DAY + 1):
        at = TODAY - DAY_SECONDS + seq * REPORT_SECONDS - random_numbers.random()
        ledger_tokens = seq * TOKENS_PER_REPORT
        fields = {
            "seq": seq,
            "at": at,
            "tokens": int(ledger_tokens * share),
            "ledger_tokens": ledger_tokens,
            "points": measured_losses(ledger_tokens, with_validation=seq % 12 == 0),
            "checkpoint": None,
            "step": seq * 50,
            "rate": 400 * share * random_numbers.uniform(0.9, 1.1),
        }
        if seq == REPORTS_A_DAY:
            fields |= newest
        reports.append(REPORT.model_copy(update=fields))
    rollup.store_reports({member.pk: rollup.SentReports(reports, [], TODAY)})


def attest(
    run: runs.Run, author: Identity, witness: Identity, total: int
) -> coordinator_messages.Attestation:
    """Attest that `witness` has applied the updates of `author`: `total` tokens."""
    update = build_update(
        author.key,
        144,
        run=str(run.pk),
        incarnation=REPORT.incarnation,
        tokens=TOKENS_PER_REPORT,
        total=total,
    )
    head = author.sign("update", update)
    return sign_attestation(witness, head, true_statement(run, head))


def create_notifications(person: User, author: User) -> None:
    for kind in NotificationType:
        Notification.create_once(
            NotificationDraft(
                person,
                kind,
                kind.value,
                f"Dawn: {kind.label}, by {mark_name(author, {})}",
                "A sentence that says more.",
                "/runs/",
            )
        )


def create_active_run(ida: User, jonas: User) -> ActiveRun:
    """Create a run that two machines of each person have joined."""
    owners_and_names = ((ida, "barn"), (ida, "loft"), (jonas, "granary"), (jonas, "<i>byre</i>"))
    machines, identities = [], []
    for seed, (owner, name) in enumerate(owners_and_names, 1):
        machine, identity = create_machine(owner, name, seed)
        machines.append(machine)
        identities.append(identity)
    run = create_launched_run(
        ida,
        "Dawn over the <i>long</i> barn 🌾",
        identities[0],
        **{"recipe.token_budget": "12000000"},
    )
    run.update_join_policy(JoinPolicy(Access.INVITATION, 8 * 10**9, 0, NOTES, None), actor=ida)
    request = coordinator_messages.JoinRequest(
        version="0.1.0", addresses=["192.0.2.7:41000"], hardware=HARDWARE
    )
    members = [admit_machine(run, machine, request) for machine in machines]
    crew_machine, crew_identity = create_machine(ida, "hayloft of the very long name 🧵", 9)
    request = request.model_copy(update={"purpose": JoinPurpose.CREW})
    admit_machine(run, crew_machine, request)
    advance_run(run)
    keys = (identities[0].key, crew_identity.key, "9" * 64)
    crew = [
        reports_module.CrewSeatView(
            key=key[:16], first_block=4 * index + 1, blocks=4, share=1 / 3, connected=index < 2
        )
        for index, key in enumerate(keys)
    ]
    return ActiveRun(run, machines, identities, members, crew, crew_machine)


def store_reports(active: ActiveRun) -> None:
    """Store a day of reports of all machines, then one of each that still trains."""
    checkpoint = REPORT.checkpoint.model_copy(update={"tokens": 8_000_000})
    for index, (member, share) in enumerate(zip(active.members, TOKEN_SHARES, strict=True)):
        newest = {"checkpoint": checkpoint} if index != 1 else {}
        if index == 3:
            newest["activity"] = "left"
        else:
            newest["peers"] = 2 if index else 1
        store_reports_of_a_day(member, share, **newest)
    advance_run(active.run)  # credit is bounded by the run's count
    for index, member in enumerate(active.members[:3]):
        attestations = [
            attest(
                active.run,
                author,
                witness=active.identities[index],
                total=int(LEDGER_TOKENS * share),
            )
            for author, share in zip(active.identities, TOKEN_SHARES, strict=True)
        ]
        now = time.time()
        fields = {
            "crew": [] if index else active.crew,
            "seq": REPORTS_A_DAY + 1,
            "at": now,
            "peers": 2 if index else 1,
            "points": [],
            "step": 7250,
            "tokens": int(LEDGER_TOKENS * TOKEN_SHARES[index]),
            "ledger_tokens": LEDGER_TOKENS,
            "rate": 900 * TOKEN_SHARES[index],
        }
        newest_report = REPORT.model_copy(update=fields)
        sent = rollup.SentReports([newest_report], attestations, now)
        rollup.store_reports({member.pk: sent})


def create_trained_run(ida: User, name: str, machine: Machine, identity: Identity) -> runs.Run:
    """Create a run that spent its budget, with what it wrote at its start and at its end."""
    run = create_launched_run(
        ida, name, identity, prompts="The barn", **{"recipe.token_budget": "720000"}
    )
    request = coordinator_messages.JoinRequest(version="0.1.0", addresses=[], hardware=HARDWARE)
    member = admit_machine(run, machine, request)
    advance_run(run)
    reports = []
    for seq in range(1, 13):
        text = "stood where the meadow ends." if seq == 12 else "oo a eee t"
        sample = reports_module.Sample(prompt=0, text=f" {text}")
        fields = {
            "seq": seq,
            "at": TODAY - DAY_SECONDS / 2 + seq * REPORT_SECONDS,
            "tokens": seq * TOKENS_PER_REPORT,
            "ledger_tokens": seq * TOKENS_PER_REPORT,
            "points": measured_losses(seq * TOKENS_PER_REPORT, with_validation=seq % 4 == 0),
            "checkpoint": None,
            "samples": reports_module.SamplesView(tokens=seq * TOKENS_PER_REPORT, texts=[sample]),
        }
        if seq == 12:
            tokens = seq * TOKENS_PER_REPORT
            fields["checkpoint"] = REPORT.checkpoint.model_copy(update={"tokens": tokens})
            fields["activity"] = "finished"
        reports.append(REPORT.model_copy(update=fields))
    rollup.store_reports({member.pk: rollup.SentReports(reports[:-1], [], TODAY)})
    advance_run(run)
    started = datetime.fromtimestamp(TODAY - DAY_SECONDS / 2, UTC)
    runs.Run.objects.filter(pk=run.pk).update(started=started)
    run.refresh_from_db()
    rollup.store_reports({member.pk: rollup.SentReports(reports[-1:], [], TODAY)})
    run.record_ledger_tokens(12 * TOKENS_PER_REPORT, 1)
    return run


def create_enrolment() -> Enrolment:
    """Create an enrolment that waits for approval."""
    description = coordinator_messages.MachineDescription(
        hostname="attic-pc",
        system="Windows 11",
        processor="Core i5",
        cores=8,
        memory_bytes=16 << 30,
    )
    return Enrolment.open(
        coordinator_messages.EnrolmentRequest(
            mirror=site_identity.identity().key,
            key=Identity(b"w" * 32).key,
            machine=description,
            issued=0,
        )
    )


@transaction.atomic
def create_examples() -> str:
    """Create the examples and return the names for addresses, as JSON."""
    ida = User.objects.get(name="Ida")
    jonas = User.objects.create_user("jonas@example.org", "oak-and-spruce-7", name=HOSTILE_NAME)
    active = create_active_run(ida, jonas)
    store_reports(active)
    run = active.run
    advance_run(run)
    noisy_author = f"{active.identities[3].key}.{REPORT.incarnation}"
    verdict = VerdictRecord.issue(
        run,
        [RetractionRequest(noisy_author, 140, {130: 60_000})],
        "noise <b>in</b> every update",
        actor=ida,
    )
    run.pause(actor=ida)
    run.resume(actor=ida)
    cancelled_run = create_launched_run(jonas, "Dusk", active.identities[0])
    cancelled_run.cancel(actor=ida)
    draft = runs.Run.create(ida, runs.NewRun("A draft", spec_from_fields({})))
    finished_run, paused_run = (
        create_trained_run(ida, name, active.machines[0], active.identities[0])
        for name in ("Harvest", "Winter")
    )
    finished_run.finish(actor=ida)
    paused_run.pause(actor=ida)
    empty_run = create_launched_run(ida, "Dawn of a beam", active.identities[0])
    advance_run(empty_run)

    team = Team.create("The <b>Weavers</b> \u202eof the very long name 🧵", ida)
    team.add_member(jonas, ida)
    _, team_invitation = TeamInvitation.send(team, "guest@example.org", ida)
    Token.create(ida, "nightly", ["runs:read"], 30)
    Webhook.objects.create(
        person=ida, url="https://example.org/hook", secret="whsec_" + "A" * 40, kinds=[]
    )
    create_notifications(ida, jonas)
    announcement = Announcement(text="The power is off tonight from 22:00.")
    announcement.publish(ida)
    run_invitation = runs.RunInvitation.create(run, "the chess club", actor=ida)
    names = {
        "announcement": announcement.pk,
        "audit_entry": AuditEntry.objects.first().pk,
        "cancelled_run": cancelled_run.slug,
        "code": create_enrolment().code,
        "crew_machine": active.crew_machine.pk,
        "draft": draft.slug,
        "empty_run": empty_run.slug,
        "finished_run": finished_run.slug,
        "paused_run": paused_run.slug,
        "jonas": jonas.pk,
        "log": Origin.objects.get(ours=True).pk,
        "machine": active.machines[0].pk,
        "membership": active.members[0].pk,
        "run": run.slug,
        "run_id": run.pk,
        "run_invitation": run_invitation.token,
        "team": team.slug,
        "team_id": team.pk,
        "team_invitation": team_invitation,
        "unsubscribe": signing.dumps(str(ida.pk), salt=UNSUBSCRIBE),
        "verdict": verdict.pk,
    }
    return json.dumps({name: str(value) for name, value in names.items()})
