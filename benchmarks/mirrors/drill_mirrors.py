"""Test what a site of three mirrors survives: `make drill-mirrors`.

Method and results: docs/benchmarks/mirrors_drill.md.

Three mirrors run, each with its own Postgres, Valkey, Celery and network namespace. Six real
workers of six people train one GPT, twenty simulated browsers watch them, and random changes are
made at the mirrors all the time. Each mirror is killed, one is cut off, servers and tasks are
killed, a disk fills, a clock is wrong, and events are replayed, altered, forged and signed in two
versions. At the end each accepted change is at each mirror, training never paused, and credit
equals the ledger.

The script prints a line for each fault, and one JSON object as its last line. It exits with 1 if a
requirement was missed. `--quick`: the same with shorter waits, about six minutes.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from bench_mirrors import configure_settings
from child_processes import ChildProcesses
from faults import QUICK, Durations, Faults
from mirror_site import Site, read_common_state
from mirror_watchers import WatcherGroup
from mirror_workers import WorkerGroup
from network import Loopback, Network, supports_namespaces
from random_changes import RandomChanges

from coordinator.demo.mirrors import build_mirror_list
from coordinator.lib.free_ports import free_port

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("North", "East", "South")
MIRRORS = len(NAMES)
WORKERS = 6
WATCHERS = 20
CHANGE_SECONDS = 0.7  # between two changes
DISK_SIZE = "400m"  # of the mirror whose disk fills
# Within which every worker must have reported to a mirror; see `AvailableClock`.
REPORT_SECONDS = 10
SPEC_FIELDS = {
    "text.tokenizer": "bytes",
    "recipe.token_budget": 1 << 40,
    "recipe.learning_rate": 2e-3,
    "recipe.step_sequences": 2,
    "recipe.schedule": "constant",
    "recipe.evaluate_every": 200_000,
}
# Seconds after the end of training within which all credit must be at every mirror.
CREDIT_SECONDS = 180.0
# The last line begins with these keys.
MAIN_RESULTS = (
    "mirrors",
    "one_state_hash",
    "lost_changes",
    "training_pauses",
    "workers_connected",
    "watchers_connected",
    "credit_equals_ledger",
    "converged_s",
)
Fault = tuple[str, Callable[[], str]]


class MirrorGroup:
    """Start and stop the three mirrors of the drill, which are set up by the real commands."""

    def __init__(self, folder: Path, drill: ChildProcesses, cleanup: ExitStack) -> None:
        self.folder = folder
        self.drill = drill
        self.people: dict[str, str] = {}  # name → id
        self.network: Network | Loopback = Loopback()
        if supports_namespaces():
            self.network = Network(MIRRORS, cleanup)
            self.network.create()
        self.sites = [
            Site(
                folder / name.lower(),
                name,
                free_port(8800 + 10 * n),
                host=self.network.host(n),
                through=self.network.command_prefix(n),
            )
            for n, name in enumerate(NAMES)
        ]
        for site in self.sites:
            drill.watch(site.child_statuses)
        self.small_disk = _mount_small_disk(self.sites[-1], cleanup)
        cleanup.callback(self._stop)  # before the disk is unmounted

    def _stop(self) -> None:
        with ThreadPoolExecutor(MIRRORS) as pool:
            list(pool.map(lambda site: site.stop(), self.sites))

    def start(self) -> None:
        """Set up and start all mirrors; return when they publish one state."""
        start = time.monotonic()
        first, *others = self.sites
        signed = build_mirror_list(self.folder, self.sites)
        assert signed is not None
        list_file = self.folder / "list.json"
        list_file.write_text(signed.model_dump_json())
        for site in self.sites:
            role = ["--publish"] if site is first else ["--join", first.url]
            site.start_servers()
            site.start_setup(*role, "--list", str(list_file))
        self._wait_for_setup(first)
        first.start_load_driver()
        names = [f"volunteer-{n}" for n in range(1, WORKERS + 1)]
        self.people = first.require("people", names=names)["people"]
        first.start()
        for site in others:
            self._wait_for_setup(site)
            site.start_load_driver()
            site.start()
        for site in self.sites:
            self.drill.wait_until(site.answers, f"{site.name}'s answer", 120)
        self.drill.wait_until(
            lambda: read_common_state(self.sites), "one state at the beginning", 120
        )
        for site in self.sites:
            site.require("token")
        seconds = time.monotonic() - start
        has_namespaces = isinstance(self.network, Network)
        where = "each in its own network namespace" if has_namespaces else "on one address"
        print(f"  three mirrors, {where}: up and in one state in {seconds:.0f} s", flush=True)

    def _wait_for_setup(self, site: Site) -> None:
        self.drill.wait_until(site.is_set_up, f"{site.name}'s first data", 240)


def _mount_small_disk(site: Site, cleanup: ExitStack) -> Path | None:
    """Mount a small file system for one mirror's database; None if that is not possible."""
    folder = site.folder / "postgres"
    folder.mkdir()
    options = f"size={DISK_SIZE},mode=0755"
    # Before it is mounted, so that it is unmounted whatever happens.
    cleanup.callback(subprocess.run, ["umount", "--lazy", folder], check=False, capture_output=True)
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "drill", folder], capture_output=True, check=False
    )
    return None if mount.returncode else folder


@dataclass
class Participants:
    """Everybody who uses the mirrors during the drill."""

    workers: WorkerGroup
    watchers: WatcherGroup
    changes: RandomChanges


def start_training(mirrors: MirrorGroup, seed: int, cleanup: ExitStack) -> Participants:
    """Start the run, its workers, the watchers and the random changes."""
    start = time.monotonic()
    sites = mirrors.sites
    drill = mirrors.drill
    first = sites[0]
    workers = WorkerGroup(mirrors.folder / "volunteers", WORKERS, drill)
    cleanup.callback(workers.stop)
    workers.measure_hardware(ROOT / "build" / "hardware.json")
    workers.enrol(first, {name: mirrors.people[name] for name in workers.names})
    owner = mirrors.people["volunteer-1"]
    run = first.require("launch", name="The drill", fields=SPEC_FIELDS, owner=owner)
    workers.run = run["run"]
    drill.wait_until(lambda: read_common_state(sites), "the run at all mirrors", 60)

    # The owner's machine prepares the text; the others join once the spec is fixed.
    workers.start(1, run["slug"])
    drill.wait_until(
        lambda: all(site.require("run_status", run=run["run"])["status"] for site in sites),
        "the run's launch",
        120,
    )
    for n in workers.numbers[1:]:
        workers.start(n, run["slug"])
    drill.wait_until(lambda: _all_train(workers), "six machines that train", 240)

    watchers = WatcherGroup(WATCHERS, run["run"], [site.url for site in sites], drill.clock)
    watchers.start()
    cleanup.callback(watchers.stop)
    drill.wait_until(lambda: watchers.connected == WATCHERS, "twenty watchers", 60)

    changes = RandomChanges(sites, CHANGE_SECONDS, seed)
    changes.start()
    cleanup.callback(changes.stop)
    workers.start_watching()
    changes.resume()
    seconds = time.monotonic() - start
    print(
        f"  {WORKERS} machines train and {WATCHERS} browsers watch after {seconds:.0f} s more",
        flush=True,
    )
    return Participants(workers, watchers, changes)


def _all_train(workers: WorkerGroup) -> bool:
    statuses = [workers.status(n) for n in workers.numbers]
    return all(status is not None and status["step"] > 0 for status in statuses)


class Drill:
    """Apply the faults and check the result."""

    def __init__(
        self, mirrors: MirrorGroup, participants: Participants, durations: Durations
    ) -> None:
        self.mirrors = mirrors
        self.drill = mirrors.drill
        self.sites = mirrors.sites
        self.workers = participants.workers
        self.watchers = participants.watchers
        self.changes = participants.changes
        self.durations = durations
        self.faults = Faults(self.drill, self.sites, self.changes, mirrors.network, durations)
        self.result: dict[str, Any] = {}

    # ---- the faults

    def list_faults(self) -> list[Fault]:
        """Return name and function of each fault, in order."""
        faults = self.faults
        north, east, south = self.sites
        found: list[Fault] = [
            ("nothing happens", faults.do_nothing),
            ("North is killed", lambda: faults.kill_mirror(north)),
            ("East is killed", lambda: faults.kill_mirror(east)),
            ("South is killed", lambda: faults.kill_mirror(south)),
            ("East is cut off", lambda: faults.cut_off_mirror(1)),
            ("South's Postgres is killed", lambda: faults.kill_postgres(south)),
            ("North's Valkey is killed", lambda: faults.kill_valkey(north)),
            ("East's Celery is killed in mid-task", lambda: faults.kill_busy_celery(east)),
            (
                "replays, alterations, a stranger, a liar",
                lambda: faults.attack(north, east, south),
            ),
            ("North's clock is an hour wrong", lambda: faults.set_wrong_clock(north)),
        ]
        small_disk = self.mirrors.small_disk
        if small_disk is not None:
            found.append(("South's disk is full", lambda: faults.fill_disk(south, small_disk)))
        else:
            faults.missed.append("full disk: not done, no file system can be mounted here")
        return found

    def run_faults(self, only: str) -> None:
        """Run all faults whose names contain one of the comma-separated words `only`."""
        words = [word for word in only.split(",") if word]
        start = time.monotonic()
        for name, run_fault in self.list_faults():
            if words and not any(word in name for word in words):
                continue
            fault_start = time.monotonic()
            missed_before = len(self.faults.missed)
            try:
                observed = run_fault()
            except (TimeoutError, AssertionError) as error:
                observed = "it went wrong"
                self.faults.missed.append(f"{name}: {error}")
                self.changes.resume()
            print(f"  {name} ({time.monotonic() - fault_start:.0f} s): {observed}", flush=True)
            for missed in self.faults.missed[missed_before:]:
                print(f"    MISSED {missed}", flush=True)
            self.drill.sleep(self.durations.between_faults)
        self.result["faults_s"] = round(time.monotonic() - start)

    # ---- the end

    def check(self) -> None:
        """Compare the mirrors after the last change: connections, events, rows and credit."""
        faults = self.faults
        self.changes.wait_until_idle()
        state_seconds = faults.wait_or_miss(
            lambda: read_common_state(self.sites), "one state at the end", 120
        )

        def count_connected() -> bool:
            self.result["watchers_connected"] = self.watchers.connected
            self.result["workers_connected"] = self._count_reporting()
            return self.result["watchers_connected"] == WATCHERS and (
                self.result["workers_connected"] == WORKERS
            )

        connect_seconds = faults.wait_or_miss(count_connected, "all connected", 60)
        self.workers.stop_watching()
        pauses = self.workers.pauses
        self.result["training_pauses"] = len(pauses)
        faults.require("the end", not pauses, f"machines paused in training: {pauses}")
        print(
            f"  one state {state_seconds:.1f} s after the last change, all connected "
            f"{connect_seconds:.1f} s later; browsers at {self.watchers.connected_by_mirror}",
            flush=True,
        )
        self._pause_run()
        self._check_credit()
        self._has_one_state("one state after training")
        self.result |= self._compare_mirrors() | {
            "accepted_changes": sum(self.changes.made.values()),
            "events": len(self.changes.accepted),
            "accepted_at": dict(self.changes.made),
            "refused_at": dict(self.changes.refused),
            "unexpected_refusals": self.changes.unexpected[:5],
            "converged_s": max(faults.converged.values(), default=state_seconds),
            "converged": faults.converged,
            "converged_wall": faults.converged_wall,
            "restarts": {site.name: dict(site.processes.restarts) for site in self.sites},
            "hostile": faults.answers,
            "watchers_longest_silence_s": round(
                max(watcher.longest_silence for watcher in self.watchers.watchers), 1
            ),
            "watchers_moves": sum(watcher.moves for watcher in self.watchers.watchers),
            "missed": faults.missed,
        }

    def _has_one_state(self, description: str) -> bool:
        """Wait until all mirrors publish one state hash; record a missed requirement otherwise."""
        missed_before = len(self.faults.missed)
        self.faults.wait_or_miss(lambda: read_common_state(self.sites), description, 60)
        return len(self.faults.missed) == missed_before

    def _compare_mirrors(self) -> dict[str, Any]:
        """Compare the mirrors' state hashes, rows and events."""
        digests = list(self.changes.accepted)
        missing: set[str] = set()
        for site in self.sites:
            missing |= set(site.require("missing_events", digests=digests)["missing"])
        rows = {site.name: site.require("rows") for site in self.sites}
        is_one_set = len({answer["rows"] for answer in rows.values()}) == 1
        counts = {name: answer["counts"] for name, answer in rows.items()}
        self.faults.require(
            "the end", is_one_set, f"the rows of people, machines and runs differ: {counts}"
        )
        return {
            "mirrors": MIRRORS,
            "one_state_hash": self._has_one_state("one state after the rows were compared"),
            "one_set_of_rows": is_one_set,
            "lost_changes": len(missing),
        }

    def _count_reporting(self) -> int:
        """Return the number of machines that reported to some mirror within ten seconds."""
        reporting: set[str] = set()
        seconds = REPORT_SECONDS / self.drill.clock.share
        for site in self.sites:
            members = site.require("members", run=self.workers.run)["members"]
            reporting |= {
                key
                for key, (age, activity) in members.items()
                if age < seconds and activity != "left"
            }
        return len(reporting & {self.workers.key(n) for n in self.workers.numbers})

    def _pause_run(self) -> None:
        """Pause the run at one mirror; wait until all machines have paused with one ledger."""
        self.sites[1].require("control_run", run=self.workers.run, command="pause")

        def have_one_ledger() -> bool:
            statuses = [self.workers.status(n) or {} for n in self.workers.numbers]
            all_paused = all(status.get("activity") == "paused" for status in statuses)
            return all_paused and len(set(self.workers.ledgers())) == 1

        seconds = self.faults.wait_or_miss(have_one_ledger, "one ledger after the pause", 120)
        self.result["paused_s"] = round(seconds, 1)

    def _check_credit(self) -> None:
        """Compare the credited tokens of each mirror with the ledger's."""
        tokens = self.workers.ledgers()[0][0]

        def credit_sums() -> list[int]:
            return [site.require("credit", run=self.workers.run)["sum"] for site in self.sites]

        seconds = self.faults.wait_or_miss(
            lambda: set(credit_sums()) == {tokens}, "credit that equals the ledger", CREDIT_SECONDS
        )
        sums = credit_sums()
        self.result |= {
            "credit_equals_ledger": set(sums) == {tokens},
            "ledger_tokens": tokens,
            "credit_tokens": sums,
            "credited_s": round(seconds, 1),
        }


def main() -> None:
    """Run the drill; exit with 1 if a requirement was missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="shorter waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--only", default="", help="run the faults whose names contain one of these: killed,disk"
    )
    parser.add_argument(
        "--keep", type=Path, help="leave the mirrors' and machines' folders and logs here"
    )
    options = parser.parse_args()
    configure_settings()
    with ExitStack() as cleanup:
        temporary = tempfile.TemporaryDirectory(
            prefix="barnraise-mirrors-", ignore_cleanup_errors=True
        )
        folder = options.keep or Path(cleanup.enter_context(temporary))
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)  # if root runs the drill, Postgres runs as another user
        children = ChildProcesses(folder, cleanup)
        mirrors = MirrorGroup(folder, children, cleanup)
        mirrors.start()
        participants = start_training(mirrors, options.seed, cleanup)
        drill = Drill(mirrors, participants, QUICK if options.quick else Durations())
        drill.run_faults(options.only)
        drill.check()
    print(json.dumps({name: drill.result.get(name) for name in MAIN_RESULTS} | drill.result))
    if drill.result["missed"] or drill.result["lost_changes"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
