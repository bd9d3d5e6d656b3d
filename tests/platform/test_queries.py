"""Bound the queries of each page, and require an index for each, on a site with many rows."""

import json
import re
import time

import pytest
from django.db import connection
from django.test.utils import CaptureQueriesContext
from helpers.site.pages import open_client

from barnraise.protocol.signing import digest
from coordinator.accounts.models import Machine, User
from coordinator.audit.models import AuditEntry
from coordinator.fleet.models import Membership
from coordinator.notify.models import Notification
from coordinator.runs.models import Run
from coordinator.telemetry.rollup import drain_queue

pytestmark = pytest.mark.django_db
BIG_TABLES = {
    "accounts_machine",
    "accounts_user",
    "fleet_membership",
    "telemetry_losspoint",
    "telemetry_rollup",
    "credit_credit",
    "telemetry_reportreceipt",
    "notify_notification",
    "audit_auditentry",
    "telemetry_checkpointholder",
}
RUNS, MACHINES = 200, 6_000


@pytest.fixture
def crowded_site(person, launched_run):
    """Fill the tables; return one of the runs, its owner's volunteer and its owner."""
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
            "INSERT INTO telemetry_losspoint "
            "(membership_id, seq, position, kind, tokens, loss, at) "
            f"SELECT id, 1, 0, 'train', 1000, 5.0, {time.time()} FROM fleet_membership"
        )
        cursor.execute(
            "INSERT INTO telemetry_rollup (membership_id, width, bucket, reports, rate_sum, "
            "tokens, updates_sent, updates_received, peer_bytes_sent, peer_bytes_received) "
            f"SELECT id, 10, {int(time.time()) // 10 * 10}, 1, 1, 1, 1, 1, 1, 1 "
            "FROM fleet_membership"
        )
        cursor.execute(
            "INSERT INTO credit_credit "
            "(id, run_id, machine_id, incarnation, day, first, last, tokens) "
            "SELECT id, run_id, machine_id, '0123456789abcdef', current_date, 1, 9, 9000 "
            "FROM fleet_membership"
        )
        cursor.execute(
            "INSERT INTO telemetry_reportreceipt (membership_id, seq, received) "
            "SELECT id, 1, now() FROM fleet_membership"
        )
        cursor.execute("ANALYZE")
    return run, ada, owner


def find_full_scans(queries: list[dict[str, str]]) -> list[str]:
    """Return the queries for which Postgres plans to read a whole big table, and that table."""
    scans = []
    with connection.cursor() as cursor:
        for query in queries:
            text = query["sql"]
            if not re.match(r"SELECT|UPDATE|DELETE|WITH", text):
                continue
            cursor.execute("EXPLAIN (FORMAT JSON) " + text.replace("%", "%%"), [])
            answer = cursor.fetchone()[0]
            plan = json.loads(answer) if isinstance(answer, str) else answer
            tables = list_scanned_tables(plan[0]["Plan"])
            scans += [f"{table}: {text[:400]}" for table in tables if table in BIG_TABLES]
    return scans


def list_scanned_tables(node: dict) -> list[str]:
    """Return the tables that a node of a plan and its children read whole."""
    own = [node["Relation Name"]] if node["Node Type"] == "Seq Scan" else []
    return own + [table for child in node.get("Plans", []) for table in list_scanned_tables(child)]


MAX_QUERIES = {  # by path
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


@pytest.mark.usefixtures("long_caches")
def test_page_needs_few_indexed_queries_on_a_large_site(crowded_site):
    run, _, owner = crowded_site
    client = open_client(owner)
    problems: dict[str, object] = {}
    for path, limit in MAX_QUERIES.items():
        address = path.format(run=run, owner=owner)
        client.get(address)  # fills caches, such as the site's settings and templates
        with CaptureQueriesContext(connection) as queries:
            answer = client.get(address)
        assert answer.status_code in (200, 404), path  # nobody has a certificate without credit
        if len(queries) > limit:
            problems[path] = f"{len(queries)} queries"
        if scans := find_full_scans(queries.captured_queries):
            problems[f"{path} without an index"] = scans
    assert not problems, json.dumps(problems, indent=2)


ADMIN_LISTS = (
    "accounts/user",
    "accounts/machine",
    "runs/run",
    "fleet/membership",
    "audit/auditentry",
)


@pytest.mark.slow  # the tests above count the queries of pages that everybody opens
@pytest.mark.usefixtures("long_caches")
def test_admin_list_reads_whole_tables_only_to_count_rows(crowded_site, person):
    staff = person("staff@example.org", is_staff=True)
    client = open_client(staff)
    problems: dict[str, object] = {}
    for path in (f"/admin/{name}/" for name in ADMIN_LISTS):
        client.get(path)  # fills caches, such as the kinds of the audit log's subjects
        with CaptureQueriesContext(connection) as queries:
            assert client.get(path).status_code == 200, path
        if len(queries) > 8:
            problems[path] = f"{len(queries)} queries"
        not_counting = [
            query
            for query in queries.captured_queries
            if not query["sql"].startswith("SELECT COUNT(*)")
        ]
        if scans := find_full_scans(not_counting):
            problems[f"{path} without an index"] = scans
    assert not problems, json.dumps(problems, indent=2)


def test_report_needs_few_indexed_queries(crowded_site, numbered_report):
    run, ada, _ = crowded_site
    ada.report(run, numbered_report(1))
    with CaptureQueriesContext(connection) as queries:
        assert ada.report(run, numbered_report(2)).status_code == 200
    assert len(queries) <= 8, [query["sql"][:200] for query in queries.captured_queries]
    assert find_full_scans(queries.captured_queries) == []


def test_statements_to_store_reports_do_not_grow_with_machines(
    crowded_site, volunteer, numbered_report
):
    run, ada, owner = crowded_site
    others = [volunteer(owner, seed) for seed in range(2, 31)]
    for machine in others:
        machine.join(run)
    drain_queue()
    counts = []
    for reporting, seq in (([ada], 2), ([ada, *others], 3)):
        for machine in reporting:
            machine.report(run, numbered_report(seq))
        with CaptureQueriesContext(connection) as queries:
            drain_queue()
        counts.append(len(queries))
        assert find_full_scans(queries.captured_queries) == []
    assert counts[1] <= counts[0] + 4, counts
