"""Test that a value which two mirrors assigned belongs to the same aggregate everywhere."""

from helpers.rebuild_site import (
    all_events,
    all_private_data,
    rebuild_in_random_order,
    replicated_rows,
)

from coordinator.accounts.models import User
from coordinator.eventlog import ingest, private_data, projection
from coordinator.runs.models import Run


def test_slug_used_at_two_mirrors_goes_to_the_same_run_at_both(person, draft):
    """Use this site as both mirrors: it is emptied, then it ingests its former log."""
    ada = person()
    events = all_events()
    private_records = all_private_data()
    first = draft(ada, "Barn")
    slugs = {first.pk: "barn"}
    first_mirror_events = all_events()
    later_records = all_private_data()
    rebuild_in_random_order(events, private_records)
    second = draft(User.objects.get(), "Barn")
    assert second.slug == "barn"
    ingest.ingest_events(first_mirror_events)
    private_data.ingest(later_records)
    slugs = {run.pk: run.slug for run in Run.objects.all()}
    assert slugs == {first.pk: "barn", second.pk: f"barn-{second.pk.hex[-8:]}"}
    third = draft(User.objects.get(), "Barn")
    assert third.slug == f"barn-{third.pk.hex[-8:]}"
    both = replicated_rows(), projection.state_hash()
    for seed in range(3):
        assert rebuild_in_random_order(all_events(), all_private_data(), seed) == both
