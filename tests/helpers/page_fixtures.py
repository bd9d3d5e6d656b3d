"""Examples of everything that a page shows; `create_examples` runs in a process of the site.

Two people, four machines that reported for a day, an active run, a finished one, a draft; a team,
invitations, a token, a webhook, notifications, an announcement. Names contain what a page must be able
to show: markup, right-to-left text, emoji, and many characters.
"""

import json
import math
import random
import time
from datetime import UTC, datetime

from django.core import signing
from django.db import transaction
from helpers.paths import GOLDEN

from barnraise.protocol import coordinator_messages, messages
from barnraise.protocol import reports as reports_module
from barnraise.protocol.signing import Identity, digest
from coordinator.accounts.models import Enrolment, Machine, Team, TeamInvitation, User
from coordinator.audit.models import AuditEntry
from coordinator.eventlog.models import Origin
from coordinator.fleet.join import admit_machine
from coordinator.fleet.lifecycle_facts import advance_run
from coordinator.fleet.models import Membership
from coordinator.fleet.verdicts import RetractionRequest, VerdictRecord
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
HOSTILE = "Jonas <b>Weber</b> \u202eof the mill 🪵"
NOTES = "# Why\n\nTo *see* whether it works.\n\n| width | loss |\n|---|---|\n| 128 | 3.1 |\n\n<script>alert(1)</script>"
DAY, EVERY, TOKENS = 86_400, 600.0, 60_000
TODAY = time.time()
dice = random.Random(5)


def create_machine(owner: User, name: str, seed: int) -> tuple[Machine, Identity]:
    identity = Identity(bytes([seed]) * 32)
    about = {"hostname": name, "system": "Linux 6.8", "processor": "Ryzen 7 7840U", "cores": 16}
    return Machine.objects.create(
        key=identity.key, owner=owner, memory_bytes=32 << 30, **about
    ), identity


def create_launched_run(owner: User, name: str, signer: Identity, **fields: str) -> runs.Run:
    run = runs.Run.create(owner, runs.NewRun(name, spec_from_fields(fields), report_every=EVERY))
    shard = {
        "train": [coordinator_messages.Shard(digest=digest("a"), tokens=9_000)],
        "held_out": [coordinator_messages.Shard(digest=digest("b"), tokens=900)],
    }
    told = coordinator_messages.TextManifest(
        run=str(run.pk), vocabulary=run.spec.model.vocabulary, tokenizer=digest("t"), **shard
    )
    run.launch(actor=owner)
    run.accept_manifest(signer.sign("manifest", told), machine=Machine.objects.get(key=signer.key))
    runs.Run.objects.filter(pk=run.pk).update(created=datetime.fromtimestamp(TODAY - DAY, UTC))
    run.refresh_from_db()
    return run


def noisy_loss(tokens: float) -> float:
    return 2.1 + 5.4 * math.exp(-tokens / 700_000) + dice.gauss(0, 0.04)


def report_of_a_day(member: Membership, share: float, **last) -> None:
    """Store a report every ten minutes with losses; `last` are fields of the newest report."""
    reports = []
    for n in range(1, 145):
        at, ledger = TODAY - DAY + n * EVERY - dice.random(), n * TOKENS
        points = [
            reports_module.MeasuredLoss(
                kind="train", tokens=ledger - k * TOKENS // 4, loss=noisy_loss(ledger)
            )
            for k in (3, 2, 1, 0)
        ]
        if n % 12 == 0:
            points.append(
                reports_module.MeasuredLoss(
                    kind="validation", tokens=ledger, loss=noisy_loss(ledger) + 0.1
                )
            )
        told = {
            "tokens": int(ledger * share),
            "ledger_tokens": ledger,
            "points": points,
            "checkpoint": None,
        }
        told |= {"step": n * 50, "rate": 400 * share * dice.uniform(0.9, 1.1)}
        told |= last if n == 144 else {}
        reports.append(REPORT.model_copy(update={"seq": n, "at": at, **told}))
    rollup.store_reports({member.pk: (reports, [], TODAY)})


def attest(
    run: runs.Run, author: Identity, witness: Identity, total: int
) -> coordinator_messages.Attestation:
    """Attest that `witness` has applied the updates of `author`: `total` tokens."""
    update = messages.Update(
        run=str(run.pk), peer=author.key, incarnation=REPORT.incarnation, seq=144, previous="0" * 64, tokens=60_000,
        total=total, fragments=[],
    )  # fmt: skip
    head = author.sign("update", update)
    word = witness.sign(
        "attestation",
        coordinator_messages.AttestationStatement(
            run=str(run.pk), author=update.author, head=digest(head.body)
        ),
    )
    return coordinator_messages.Attestation(
        head=coordinator_messages.SignedHeader(**head.model_dump()),
        statement=coordinator_messages.SignedStatement(**word.model_dump()),
    )


def create_notifications(person: User) -> None:
    for kind in NotificationType:
        Notification.create_once(
            NotificationDraft(
                person,
                kind,
                kind.value,
                f"Dawn: {kind.label}",
                "A sentence that says more.",
                "/runs/",
            )
        )


@transaction.atomic
def create_examples() -> str:
    """Create the examples and return the names for addresses, as JSON."""
    ida = User.objects.get(name="Ida")
    jonas = User.objects.create_user("jonas@example.org", "oak-and-spruce-7", name=HOSTILE)
    named = ((ida, "barn"), (ida, "loft"), (jonas, "granary"), (jonas, "<i>byre</i>"))
    places = [create_machine(owner, name, seed) for seed, (owner, name) in enumerate(named, 1)]
    signer = places[0][1]
    run = create_launched_run(
        ida, "Dawn over the <i>long</i> barn 🌾", signer, **{"recipe.token_budget": "12000000"}
    )
    run.update_join_policy(JoinPolicy(Access.INVITATION, 8 * 10**9, 0, NOTES, None), actor=ida)
    asked = coordinator_messages.JoinRequest(
        version="0.1.0", addresses=["192.0.2.7:41000"], hardware=HARDWARE
    )
    members = [admit_machine(run, each, asked) for each, _ in places]
    advance_run(run)
    shares = (0.4, 0.3, 0.2, 0.1)
    for n, (member, share) in enumerate(zip(members, shares, strict=True)):
        new = (
            {"checkpoint": REPORT.checkpoint.model_copy(update={"tokens": 8_000_000})}
            if n != 1
            else {}
        )
        new |= {"activity": "left"} if n == 3 else {"peers": 2 if n else 1}
        report_of_a_day(member, share, **new)
    for n, member in enumerate(members[:3]):
        seen = [
            attest(run, author, witness=places[n][1], total=int(8_640_000 * share))
            for (_, author), share in zip(places, shares, strict=True)
        ]
        more = {"seq": 145, "at": time.time(), "peers": 2 if n else 1, "points": [], "step": 7250}
        more |= {
            "tokens": int(8_640_000 * shares[n]),
            "ledger_tokens": 8_640_000,
            "rate": 900 * shares[n],
        }
        rollup.store_reports({member.pk: ([REPORT.model_copy(update=more)], seen, time.time())})
    advance_run(run)
    noisy = f"{places[3][1].key}.{REPORT.incarnation}"
    verdict = VerdictRecord.issue(
        run,
        [RetractionRequest(noisy, 140, {12: 60_000})],
        "noise <b>in</b> every update",
        actor=ida,
    )
    run.pause(actor=ida)
    run.resume(actor=ida)
    over = create_launched_run(jonas, "Dusk", signer)
    over.cancel(actor=ida)
    waiting = runs.Run.create(ida, runs.NewRun("A draft", spec_from_fields({})))

    team = Team.create("The <b>Weavers</b> \u202eof the very long name 🧵", ida)
    team.add_member(jonas, ida)
    _, token = TeamInvitation.send(team, "guest@example.org", ida)
    Token.create(ida, "nightly", ["runs:read"], 30)
    hook = Webhook.objects.create(
        person=ida, url="https://example.org/hook", secret="whsec_" + "A" * 40, kinds=[]
    )
    create_notifications(ida)
    said = Announcement(text="The power is off tonight from 22:00.")
    said.publish(ida)
    about = coordinator_messages.MachineDescription(
        hostname="attic-pc",
        system="Windows 11",
        processor="Core i5",
        cores=8,
        memory_bytes=16 << 30,
    )
    key = Identity(b"w" * 32).key
    code = Enrolment.open(
        coordinator_messages.EnrolmentRequest(
            mirror=site_identity.identity().key, key=key, machine=about, issued=0
        )
    ).code
    bid = runs.RunInvitation.create(run, "the chess club", actor=ida)
    names = {
        "run": run.slug, "over": over.slug, "draft": waiting.slug, "bid": bid.token, "run_id": run.pk,
        "machine": places[0][0].pk, "ida": ida.pk, "jonas": jonas.pk, "team": team.slug, "team_id": team.pk,
        "token": token, "hook": hook.pk, "said": said.pk, "code": code, "entry": AuditEntry.objects.first().pk,
        "off": signing.dumps(str(ida.pk), salt=UNSUBSCRIBE), "membership": members[0].pk,
        "verdict": verdict.pk,
        "log": Origin.objects.get(ours=True).pk,
    }  # fmt: skip
    return json.dumps({name: str(value) for name, value in names.items()})
