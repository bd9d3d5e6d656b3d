"""However many runs and machines there are: a page asks the same few questions, and Postgres finds each by an index."""

import json
import re
import time

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine, User
from coordinator.audit.models import AuditEntry
from coordinator.fleet.models import Membership
from coordinator.notify.models import Notification
from coordinator.runs.models import Run
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db
BIG = {
    "accounts_machine", "accounts_user", "fleet_membership", "telemetry_losspoint", "telemetry_rollup", "credit_credit",
    "telemetry_reportreceipt", "notify_notification", "audit_auditentry", "telemetry_checkpointholder",
}  # fmt: skip
RUNS, MACHINES = 200, 6_000


@pytest.fixture
def crowd(person, launched_run):
    """(run, its owner's volunteer, the owner): one of so many runs, with its share of so many machines."""
    owner = person(organiser=True)
    run, ada = launched_run(owner)
    fields = {
        f.attname: getattr(run, f.attname)
        for f in Run._meta.concrete_fields
        if f.attname not in ("id", "slug")
    }
    runs = [run, *Run.objects.bulk_create(Run(**fields, slug=f"run-{n}") for n in range(RUNS))]
    people = User.objects.bulk_create(
        User(email=f"{n}@example.org", password="!") for n in range(MACHINES // 3)
    )
    machines = Machine.objects.bulk_create(
        Machine(key=digest(str(n)), owner=people[n // 3], hostname=f"pc-{n}")
        for n in range(MACHINES)
    )
    Membership.objects.bulk_create(
        Membership(run=runs[n % len(runs)], machine=m, activity="training")
        for n, m in enumerate(machines)
    )
    Notification.objects.bulk_create(
        Notification(person=p, kind="run.started", key="one", title="A run started") for p in people
    )
    AuditEntry.objects.bulk_create(
        AuditEntry(action="machine.enrolled", subject_kind="machine", subject_id=m.pk)
        for m in machines
    )
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO telemetry_losspoint (membership_id, seq, position, kind, tokens, loss, at) "
            f"SELECT id, 1, 0, 'train', 1000, 5.0, {time.time()} FROM fleet_membership"
        )
        cursor.execute(
            "INSERT INTO telemetry_rollup (membership_id, width, bucket, reports, rate_sum, tokens, updates_sent, "
            "updates_received, peer_bytes_sent, peer_bytes_received) "
            f"SELECT id, 10, {int(time.time()) // 10 * 10}, 1, 1, 1, 1, 1, 1, 1 FROM fleet_membership"
        )
        cursor.execute(
            "INSERT INTO credit_credit (id, run_id, machine_id, incarnation, day, first, last, tokens) SELECT id, "
            "run_id, machine_id, '0123456789abcdef', current_date, 1, 9, 9000 FROM fleet_membership"
        )
        cursor.execute(
            "INSERT INTO telemetry_reportreceipt (membership_id, seq, received) SELECT id, 1, now() FROM fleet_membership"
        )
        cursor.execute("ANALYZE")
    return run, ada, owner


def without_an_index(queries: list[dict[str, str]]) -> list[str]:
    """Which of them read a whole big table, as Postgres itself plans them, and whose table."""
    found = []
    with connection.cursor() as cursor:
        for query in queries:
            if not re.match(r"SELECT|UPDATE|DELETE|WITH", text := query["sql"]):
                continue
            cursor.execute("EXPLAIN (FORMAT JSON) " + text.replace("%", "%%"), [])
            told = cursor.fetchone()[0]
            plan = json.loads(told) if isinstance(told, str) else told
            found += [
                f"{table}: {text[:400]}" for table in _read_whole(plan[0]["Plan"]) if table in BIG
            ]
    return found


def _read_whole(node: dict) -> list[str]:
    own = [node["Relation Name"]] if node["Node Type"] == "Seq Scan" else []
    return own + [table for child in node.get("Plans", []) for table in _read_whole(child)]


PAGES = {  # path → at most so many questions
    "/": 8,
    "/runs/": 8,
    "/runs/{run.slug}/": 24,
    "/live/{run.pk}/": 16,
    "/machines/": 10,
    "/notifications/": 10,
    "/notifications/settings/": 10,
    "/account/": 16,
    "/volunteers/{owner.pk}/": 20,
    "/teams/": 10,
    "/credit/": 12,
    "/status": 8,
}


def test_no_page_reads_a_whole_table_or_asks_more_because_there_is_more(crowd, valkey):
    run, _, owner = crowd
    client = Client()
    client.force_login(owner)
    found: dict[str, object] = {}
    for path, most in PAGES.items():
        where = path.format(run=run, owner=owner)
        client.get(
            where
        )  # what a process learns once (the site's rules, its templates) is not counted
        with CaptureQueriesContext(connection) as asked:
            answer = client.get(where)
        assert answer.status_code in (200, 404), path  # nobody has a certificate without credit
        if len(asked) > most:
            found[path] = f"{len(asked)} queries"
        if slow := without_an_index(asked.captured_queries):
            found[f"{path} without an index"] = slow
    assert not found, json.dumps(found, indent=2)


LISTS = ("accounts/user", "accounts/machine", "runs/run", "fleet/membership", "audit/auditentry")


def test_no_list_of_the_admin_reads_a_whole_table_but_to_count_it(crowd, person, valkey):
    staff = person("staff@example.org", is_staff=True)
    client = Client()
    client.force_login(staff)
    found: dict[str, object] = {}
    for path in (f"/admin/{each}/" for each in LISTS):
        client.get(
            path
        )  # what is known for some minutes then, as the kinds of subjects, is not counted
        with CaptureQueriesContext(connection) as asked:
            assert client.get(path).status_code == 200, path
        if len(asked) > 8:
            found[path] = f"{len(asked)} queries"
        rest = [
            query
            for query in asked.captured_queries
            if not query["sql"].startswith("SELECT COUNT(*)")
        ]
        if slow := without_an_index(rest):
            found[f"{path} without an index"] = slow
    assert not found, json.dumps(found, indent=2)


def test_a_report_asks_few_questions_and_reads_no_whole_table(crowd, numbered_report):
    run, ada, _ = crowd
    ada.report(run, numbered_report(1))
    with CaptureQueriesContext(connection) as asked:
        assert ada.report(run, numbered_report(2)).status_code == 200
    assert len(asked) <= 8, [query["sql"][:200] for query in asked.captured_queries]
    assert not (slow := without_an_index(asked.captured_queries)), slow


def test_storing_reports_takes_equally_many_statements_for_any_crowd(
    crowd, volunteer, numbered_report
):
    run, ada, owner = crowd
    others = [volunteer(owner, seed) for seed in range(2, 31)]
    for each in others:
        each.join(run)
    drain_queue()
    counts = []
    for reporting, seq in (([ada], 2), ([ada, *others], 3)):
        for each in reporting:
            each.report(run, numbered_report(seq))
        with CaptureQueriesContext(connection) as asked:
            drain_queue()
        counts.append(len(asked))
        assert not (slow := without_an_index(asked.captured_queries)), slow
    assert counts[1] <= counts[0] + 4, counts
