"""Two real mirrors: one begins from the other, each goes on while the other is dead, and both show a run whole."""

import httpx
import pytest
from helpers.live_site import wait_until
from helpers.mirror_pair import (
    MirrorProcess,
    ReportingMachine,
    create_run,
    publish_list,
    two_mirrors,
)


@pytest.fixture
def sites(state, tmp_path):
    with two_mirrors(tmp_path) as made:
        yield made


def people(site: MirrorProcess) -> str:
    return site.shell(
        "from coordinator.accounts.models import User; print(sorted(User.objects.values_list('name', flat=True)))"
    )


def pulled(site: MirrorProcess) -> str:
    """Its state hash after a pull that nothing was wrong with."""
    lines = site.manage("replication", "pull").strip().splitlines()
    assert not [line for line in lines if line.startswith("  ")], lines
    return lines[-1]


def test_second_mirror_joins_and_each_works_while_the_other_is_dead(sites, tmp_path):
    a, b = sites
    digest = publish_list(a, b, tmp_path)
    a.manage(
        "prepare_owner",
        "--email",
        "ida@example.org",
        "--password",
        "raise-the-frame-7",
        "--name",
        "Ida",
    )
    a.start()
    assert "Nothing was taken" in b.manage(
        "replication", "join", a.url, "--list", "0" * 64, fails=True
    )
    joined = b.manage("replication", "join", a.url, "--list", digest).strip().splitlines()[-1]
    assert "Ida" in people(b), "what events only name by a digest has come, too"

    a.kill()
    assert "does not answer" in b.manage("replication", "pull")
    b.manage(
        "prepare_owner",
        "--email",
        "bob@example.org",
        "--password",
        "raise-the-frame-7",
        "--name",
        "Bob",
    )
    b.start()
    there = pulled(a)
    assert there != joined and "Bob" in people(a) and "Ida" in people(a)
    a.start()
    assert pulled(b) == there, "one state on both"


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

    def whole(site: MirrorProcess) -> bool:
        seen = site.snapshot(run)
        machines = {row["name"]: row["tokens"] for row in seen["workers"]} == {
            "barn": 2000,
            "loft": 1500,
        }
        losses = [x for x, _ in seen["train"]] == [1000, 2000, 3000, 4000]
        joined = [event["what"] for event in seen["events"]].count("joined")
        return machines and losses and joined == 2 and len(seen["plans"]) == 2

    for site in (a, b):
        wait_until(lambda site=site: whole(site), f"all machines at {site.name}")

    a.kill()
    barn.send_reports(b, run, 4, 5)  # what A had not confirmed comes again
    wait_until(lambda: b.snapshot(run)["run"]["tokens"] == 5000, "the next report")
    wait_until(lambda: len(b.snapshot(run)["train"]) == 5, "the next loss")
    seen = b.snapshot(run)
    assert seen["run"]["workers_known"] == 2
    assert [x for x, _ in seen["train"]] == [1000, 2000, 3000, 4000, 5000], (
        "no hole, and nothing twice"
    )
    assert [event["what"] for event in seen["events"]].count("joined") == 2, "it did not join again"
    answer = httpx.get(f"{b.url}/live/{run}/", headers={"Origin": a.url}, timeout=30)
    assert answer.headers["Access-Control-Allow-Origin"] == a.url
    wait_until(
        lambda: b.snapshot(run)["run"]["workers_alive"] == 0, "what is heard of no more to grow old"
    )
