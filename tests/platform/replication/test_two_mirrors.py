"""Test two real mirrors: joining, working while the other is dead, and showing whole runs."""

import httpx
import pytest
from helpers.mirrors.mirror_pair import (
    MirrorProcess,
    ReportingMachine,
    create_run,
    publish_list,
    two_mirrors,
)
from helpers.site.live_site import wait_until

PASSWORD = ("--password", "raise-the-frame-7")


@pytest.fixture
def sites(state, tmp_path):
    """Yield two mirrors that do not know each other."""
    with two_mirrors(tmp_path) as mirrors:
        yield mirrors


def list_names(site: MirrorProcess) -> str:
    """Return the names of all people at a mirror."""
    return site.shell(
        "from coordinator.accounts.models import User\n"
        "print(sorted(User.objects.values_list('name', flat=True)))"
    )


def pull_and_read_state_hash(site: MirrorProcess) -> str:
    """Pull without an error and return the site's state hash."""
    lines = site.manage("replication", "pull").strip().splitlines()
    assert not [line for line in lines if line.startswith("  ")], lines
    return lines[-1]


@pytest.mark.slow  # tests/browser/test_mirrors.py joins and kills a mirror too
def test_second_mirror_joins_and_each_works_while_the_other_is_dead(sites, tmp_path):
    a, b = sites
    digest = publish_list(a, b, tmp_path)
    a.manage("prepare_owner", *PASSWORD, "--email", "ida@example.org", "--name", "Ida")
    a.start()
    assert "Nothing was taken" in b.manage(
        "replication", "join", a.url, "--list", "0" * 64, fails=True
    )
    state_after_join = (
        b.manage("replication", "join", a.url, "--list", digest).strip().splitlines()[-1]
    )
    assert "Ida" in list_names(b), "private data was not pulled"

    a.kill()
    assert "does not answer" in b.manage("replication", "pull")
    b.manage("prepare_owner", *PASSWORD, "--email", "bob@example.org", "--name", "Bob")
    b.start()
    state_at_first = pull_and_read_state_hash(a)
    assert state_at_first != state_after_join and "Bob" in list_names(a) and "Ida" in list_names(a)
    a.start()
    assert pull_and_read_state_hash(b) == state_at_first, "the mirrors have different states"


@pytest.mark.slow  # test_run_page_own_mirror_killed_continues_at_another_and_returns is quicker
def test_each_mirror_shows_all_machines_of_a_run_and_one_that_moves_once(sites, tmp_path):
    a, b = sites
    run = create_run(a)["run"]
    digest = publish_list(a, b, tmp_path)
    a.start()
    b.manage("replication", "join", a.url, "--list", digest)
    b.start()
    a.start_tasks()
    b.start_tasks()
    barn, loft = ReportingMachine(1), ReportingMachine(2)
    barn.send_reports(a, run, 1, 2, 3, 4)
    loft.send_reports(b, run, 1, 2, 3, rate=100.0)

    def is_complete(site: MirrorProcess) -> bool:
        snapshot = site.snapshot(run)
        tokens = {row["name"]: row["tokens"] for row in snapshot["workers"]}
        losses = [x for x, _ in snapshot["train"]]
        joined = [event["what"] for event in snapshot["events"]].count("joined")
        return (
            tokens == {"barn": 2000, "loft": 1500}
            and losses == [1000, 2000, 3000, 4000]
            and joined == 2
            and len(snapshot["plans"]) == 2
        )

    for site in (a, b):
        wait_until(lambda site=site: is_complete(site), f"all machines at {site.name}")

    a.kill()
    barn.send_reports(b, run, 4, 5)  # A had not confirmed report 4
    wait_until(lambda: b.snapshot(run)["run"]["tokens"] == 5000, "the next report")
    wait_until(lambda: len(b.snapshot(run)["train"]) == 5, "the next loss")
    snapshot = b.snapshot(run)
    assert snapshot["run"]["workers_known"] == 2
    losses = [x for x, _ in snapshot["train"]]
    assert losses == [1000, 2000, 3000, 4000, 5000], "a loss is missing or duplicated"
    joined = [event["what"] for event in snapshot["events"]].count("joined")
    assert joined == 2, "the machine joined twice"
    answer = httpx.get(f"{b.url}/live/{run}/", headers={"Origin": a.url}, timeout=30)
    assert answer.headers["Access-Control-Allow-Origin"] == a.url
    wait_until(
        lambda: b.snapshot(run)["run"]["workers_alive"] == 0, "silent machines to count as gone"
    )
