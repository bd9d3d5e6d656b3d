"""Test that mirrors add up witnesses, each verified by the mirror that receives it."""

from datetime import timedelta

import hypothesis.strategies as st
import pytest
from django.utils import timezone
from helpers.mirrors.mirror_lists import list_entry, signed_list
from helpers.site.remote_telemetry import OTHER, elsewhere, ingest_page, page
from helpers.updates.attestations import altered_witness_of, witness_of
from hypothesis import HealthCheck, given, settings

from barnraise.protocol.signing import Identity
from coordinator.credit.attestations import extend_delayed_credit, record_attestations
from coordinator.credit.models import Credit
from coordinator.fleet.models import UpdateWitness, VouchedAuthor
from coordinator.fleet.verdict_models import VerdictRecord
from coordinator.fleet.verdict_requests import ExclusionRequest
from coordinator.lib import site_identity
from coordinator.replication import mirror_list
from coordinator.runs.models import Run
from coordinator.telemetry.remote import export
from coordinator.telemetry.remote.protocol import TelemetryPage, TelemetryPosition, WitnessRow

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("valkey")]


@pytest.fixture
def witnessed_run(person, launched_run, strangers):
    """Return a run of several mirrors, an author and three other people's machines in it."""
    own_entry = list_entry(site_identity.identity(), "https://here.example.org")
    first = signed_list(1, own_entry)
    mirror_list.ingest_lists([first], vouched=first.digest)
    run, _ = launched_run(person("owner@example.org"), seed=9)
    machines = strangers(run, 1, 2, 3, 4)
    Run.objects.filter(pk=run.pk).update(created=timezone.now() - timedelta(days=30))
    run.record_ledger_tokens(10**9)
    run.refresh_from_db()
    return run, *machines


def witness_page(run, *attested, **fields) -> TelemetryPage:
    """Build another mirror's page of witnesses; each is (machine, its attestation)."""
    rows = [WitnessRow(n, seen.head, seen.statement) for n, (_, seen) in enumerate(attested)]
    machines = [elsewhere(run, machine) for machine, _ in attested]
    return page(*machines, witnesses=rows, **fields)


def report_here(run, machine, *attestations) -> None:
    """Record attestations as this site does with reports."""
    member = run.memberships.get(machine=machine.machine)
    record_attestations([(member, list(attestations))], changed=7)


def credited_tokens() -> int:
    """Return all credited tokens."""
    return sum(Credit.objects.values_list("tokens", flat=True))


def stored_state() -> tuple[set, set]:
    """Return the witnesses and what others vouch for, without times."""
    witnesses = UpdateWitness.objects.values_list("machine", "person", "seq", "total", "digest")
    vouched = VouchedAuthor.objects.values_list("machine", "seq", "total")
    return set(witnesses), set(vouched)


def forget_all() -> None:
    """Delete all witnesses and credit."""
    for model in (Credit, UpdateWitness, VouchedAuthor):
        model.objects.all().delete()


def test_witnesses_at_two_mirrors_add_up_to_credit_at_both(witnessed_run):
    run, ada, carl, dora, _ = witnessed_run
    for here, there in ((carl, dora), (dora, carl)):
        forget_all()
        report_here(run, there, witness_of(there, run, ada, 2, 2000))
        sent = export.build_page(TelemetryPosition())
        assert len(sent.witnesses) == 1 and not export.build_page(sent.position).witnesses
        forget_all()
        report_here(run, here, witness_of(here, run, ada, 3, 3000))
        assert credited_tokens() == 0
        assert ingest_page(TelemetryPage.model_validate_json(sent.model_dump_json())).rows
        assert credited_tokens() == 2000
        passed_on = export.build_page(TelemetryPosition()).witnesses
        assert [row.statement.key for row in passed_on] == [here.identity.key]


def test_mirror_that_forges_or_alters_a_witness_changes_nothing(witnessed_run):
    run, ada, carl, dora, _ = witnessed_run
    report_here(run, carl, witness_of(carl, run, ada, 2, 2000))
    before = stored_state()
    valid = witness_of(dora, run, ada, 2, 2000)
    stranger = Identity(b"q" * 32)
    unsigned = valid.statement.model_copy(update={"signature": "0" * 128})
    altered_body = valid.head.body.replace('"total":2000', '"total":9000')
    assert altered_body != valid.head.body
    by_stranger = stranger.sign("attestation", carl.identity.sign("x", valid.head))
    forged = [
        (dora, valid.model_copy(update={"statement": unsigned})),
        (
            dora,
            valid.model_copy(update={"head": valid.head.model_copy(update={"body": altered_body})}),
        ),
        (dora, altered_witness_of(dora, run, ada, {"head": "0" * 64})),
        (dora, witness_of(carl, run, ada, 2, 2000)),
        (
            dora,
            valid.model_copy(
                update={"statement": valid.statement.model_copy(update=by_stranger.model_dump())}
            ),
        ),
    ]
    for machine, attestation in forged:
        result = ingest_page(witness_page(run, (machine, attestation)))
        assert "signatures prove nothing" in result.left_out and stored_state() == before
    ingest_page(witness_page(run, (ada, witness_of(ada, run, ada, 2, 2000))))
    assert stored_state() == before, "an author witnessed its own updates"
    VerdictRecord.issue(run, [], exclude=[ExclusionRequest(dora.machine.owner, False)])
    ingest_page(witness_page(run, (dora, valid)))
    assert stored_state() == before and credited_tokens() == 0, "an excluded person witnessed"


@settings(
    max_examples=8,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)), max_size=8),
    st.randoms(),
)
def test_witness_rows_lead_to_one_state_in_any_order(witnessed_run, statements, random):
    """Deliver statements (witness, author, number) in two orders, here or by mirrors, twice."""
    run, *machines = witnessed_run
    attested = [
        (machines[witness], witness_of(machines[witness], run, machines[author], seq, 100 * seq))
        for witness, author, seq in statements
    ]
    states = []
    for _ in range(2):
        forget_all()
        deliveries = attested + random.sample(attested, len(attested) // 2)
        random.shuffle(deliveries)
        for machine, attestation in deliveries:
            if random.random() < 0.5:
                report_here(run, machine, attestation)
            else:
                mirror = random.choice((OTHER, "c" * 64))
                ingest_page(witness_page(run, (machine, attestation)), key=mirror)
        states.append((stored_state(), credited_tokens()))
    assert states[0] == states[1]


def test_pages_of_witnesses_are_bounded_in_number_and_bytes(witnessed_run, monkeypatch):
    run, *machines = witnessed_run
    for witness in machines:
        for author in machines:
            if witness is not author:
                report_here(run, witness, witness_of(witness, run, author, 2, 2000))
    for name, limit in (("MAX_WITNESS_ROWS", 5), ("WITNESS_BYTES", 1)):
        monkeypatch.setattr(export, name, limit)
        position = TelemetryPosition()
        received = []
        more = True
        while more:
            exported = export.build_page(position)
            assert len(exported.witnesses) <= limit
            received += [row.statement.signature for row in exported.witnesses]
            position, more = exported.position, exported.more
        assert len(received) == len(set(received)) == 12
    with pytest.raises(ValueError, match="at most 100"):
        witness_page(run, *[(machines[0], witness_of(machines[0], run, machines[1], 2, 200))] * 101)


def test_credit_beyond_the_runs_count_is_given_when_the_count_follows(witnessed_run):
    run, ada, carl, dora, _ = witnessed_run
    for tokens, credited in ((1950, 0), (2000, 2000)):
        run.record_ledger_tokens(tokens)
        run.refresh_from_db()
        if not credited:
            for machine in (carl, dora):
                report_here(run, machine, witness_of(machine, run, ada, 2, 2000))
        extend_delayed_credit()
        assert credited_tokens() == credited
