"""What a site of three mirrors survives: `make drill-mirrors`, docs/benchmarks/mirrors_drill.md.

Three mirrors, each with its own Postgres, Valkey, Celery and network namespace; six real workers, each another
person's, train one GPT; twenty browsers' websockets watch them; and at the mirrors people decide things all the while.
Each mirror is killed, one is cut off, servers and tasks are killed, a disk fills, a clock is wrong, and events are
replayed, altered, forged and told in two ways. In the end each accepted change is at each mirror, training never
paused, and credit equals the ledger. Prints a line a fault, and one JSON object as its last line. `--quick`: the same
in some four minutes.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from faults import QUICK, Faults, Span
from mirror_site import Site, until
from mirror_watchers import Watchers
from mirror_workers import Workers
from network import Loopback, Network, possible
from random_changes import Changes

from coordinator.demo.mirrors import build_mirror_list, common_state_hash
from coordinator.demo.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
MIRRORS, WORKERS, WATCHERS = 3, 6, 20
NAMES = ("North", "East", "South")
EVERY = 0.7  # seconds between two changes
DISK = "400m"  # of the mirror whose disk fills
FIELDS = {
    "text.tokenizer": "bytes", "recipe.token_budget": 1 << 40, "recipe.learning_rate": 2e-3,
    "recipe.step_sequences": 2, "recipe.schedule": "constant", "recipe.evaluate_every": 200_000,
}  # fmt: skip
CREDITED = 180.0  # seconds after training's end until the last updates' credit must be everywhere


class Drill:
    """As a context manager: whatever it started ends with it."""

    def __init__(self, folder: Path, span: Span, seed: int):
        self.folder, self.span, self.seed = folder, span, seed
        self.leave = ExitStack()
        self.found: dict[str, Any] = {}

    def __enter__(self) -> "Drill":
        return self

    def __exit__(self, *_: object) -> None:
        self.leave.close()

    # ---- before

    def raise_mirrors(self) -> None:
        began = time.monotonic()
        self.network = self.leave.enter_context((Network if possible() else Loopback)(MIRRORS))
        self.sites = [
            Site(self.folder / name.lower(), name, free_port(8800 + 10 * n), host=self.network.host(n),
                 through=self.network.through(n))
            for n, name in enumerate(NAMES)
        ]  # fmt: skip
        self.leave.callback(self._stop_sites)
        self.small = self._small_disk(self.sites[-1])
        first, signed = self.sites[0], self.folder / "list.json"
        signed.write_text(build_mirror_list(self.folder, self.sites).model_dump_json())
        for each in self.sites:
            each.start_servers()
            each.start_setup(
                *(["--publish"] if each is self.sites[0] else ["--join", self.sites[0].url]),
                "--list",
                str(signed),
            )
        first = self.sites[0]
        until(lambda: self._raised(first), first.name, 240)
        first.start_clerk()
        people = first.require("people", names=[f"volunteer-{n}" for n in range(1, WORKERS + 1)])[
            "people"
        ]
        first.start()
        for each in self.sites[1:]:
            until(lambda each=each: self._raised(each), each.name, 240)
            each.start_clerk()
            each.start()
        for each in self.sites:
            until(each.answers, f"{each.name}'s answer", 120)
        until(lambda: common_state_hash(self.sites), "one state at the beginning", 120)
        for each in self.sites:
            each.require("token")
        self.people = people
        where = "each in a network namespace of its own" if possible() else "on one address"
        print(
            f"  three mirrors, {where}: up and one in {time.monotonic() - began:.0f} s", flush=True
        )

    def _raised(self, site: Site) -> bool:
        if failed := site.processes.failed_process():
            raise RuntimeError(f"{site.name} did not come up: {site.processes.log_tail(failed)}")
        return site.is_set_up()

    def _small_disk(self, site: Site) -> Path | None:
        """A file system of its own for one mirror's database, small enough to be filled; None where that cannot be."""
        place = site.folder / "postgres"
        place.mkdir()
        mounted = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=0755", "drill", place],
            capture_output=True,
            check=False,
        )
        if mounted.returncode:
            return None
        self.leave.callback(subprocess.run, ["umount", "--lazy", place], check=False)
        self.leave.callback(self._stop_sites)  # before that
        return place

    def _stop_sites(self) -> None:
        with ThreadPoolExecutor(MIRRORS) as crew:
            list(crew.map(lambda each: each.stop(), self.sites))

    def start_training(self) -> None:
        """The run, its workers, those who watch and those who decide."""
        began, first = time.monotonic(), self.sites[0]
        self.workers = Workers(self.folder / "volunteers", WORKERS)
        self.leave.callback(self.workers.stop)
        self.workers.measure(ROOT / "build" / "hardware.json")
        self.workers.enrol(first, {name: self.people[name] for name in self.workers.names})
        made = first.require(
            "launch", name="The drill", fields=FIELDS, owner=self.people["volunteer-1"]
        )
        self.workers.run = made["run"]
        until(lambda: common_state_hash(self.sites), "the run at all mirrors", 60)
        self.workers.start(1, made["slug"])  # prepares the text: its owner's
        until(
            lambda: all(s.require("launched", run=made["run"])["status"] for s in self.sites),
            "the run's launch",
            120,
        )
        for n in self.workers.numbers[1:]:
            self.workers.start(n, made["slug"])
        until(self._all_train, "six machines that train", 240)
        self.watchers = Watchers(WATCHERS, made["run"], [each.url for each in self.sites])
        self.watchers.start()
        self.leave.callback(self.watchers.end)
        until(lambda: self.watchers.connected == WATCHERS, "twenty watchers", 60)
        self.changes = Changes(self.sites, EVERY, self.seed)
        self.changes.start()
        self.leave.callback(self.changes.end)
        self.workers.watch()
        self.changes.go()
        print(f"  {WORKERS} machines train and {WATCHERS} browsers watch after {time.monotonic() - began:.0f} s more",
              flush=True)  # fmt: skip

    def _all_train(self) -> bool:
        assert self.workers.alive == len(self.workers.family.children), (
            self.workers.family.log_tail("worker-1")
        )
        said = [self.workers.status(n) for n in self.workers.numbers]
        return all(each and each["step"] > 0 for each in said)

    # ---- what is done, and after it

    def trials(self, faults: Faults) -> list[tuple[str, Callable[[], str]]]:
        north, east, south = self.sites
        found: list[tuple[str, Callable[[], str]]] = [("nothing happens", faults.nothing)]
        found += [
            (f"{each.name} is killed", lambda each=each: faults.killed(each)) for each in self.sites
        ]
        found += [
            ("East is cut off", lambda: faults.cut_off(1)),
            ("South's Postgres is killed", lambda: faults.without_postgres(south)),
            ("North's Valkey is killed", lambda: faults.without_valkey(north)),
            ("East's Celery is killed in mid-task", lambda: faults.celery_in_mid_task(east)),
            (
                "replays, alterations, a stranger, a liar",
                lambda: faults.hostile(north, east, south),
            ),
            ("North's clock is an hour wrong", lambda: faults.wrong_clock(north)),
        ]
        if self.small is not None:
            found.append(("South's disk is full", lambda: faults.full_disk(south, self.small)))
        else:
            faults.missed.append("full disk: not done, no file system can be mounted here")
        return found

    def afflict(self, only: str) -> Faults:
        faults = Faults(self.sites, self.changes, self.network, self.span)
        words = [word for word in only.split(",") if word]
        began = time.monotonic()
        for name, trial in self.trials(faults):
            if words and not any(word in name for word in words):
                continue
            started, before = time.monotonic(), len(faults.missed)
            try:
                saw = trial()
            except (TimeoutError, AssertionError) as error:
                saw = "it went wrong"
                faults.missed.append(f"{name}: {error}")
                self.changes.go()
            print(f"  {name} ({time.monotonic() - started:.0f} s): {saw}", flush=True)
            for missed in faults.missed[before:]:
                print(f"    MISSED {missed}", flush=True)
            faults.rest(self.span.between)
        self.found["faults_s"] = round(time.monotonic() - began)
        return faults

    def end(self, faults: Faults) -> None:
        """Compare the mirrors after the last change: processes, rows and credit."""
        self.changes.wait_until_idle()
        took = faults.within(lambda: common_state_hash(self.sites), "one state at the end", 120)
        connected = faults.within(
            lambda: self.watchers.connected == WATCHERS and self._reporting() == WORKERS,
            "all connected",
            60,
        )
        self.found |= {
            "workers_connected": self._reporting(),
            "watchers_connected": self.watchers.connected,
        }
        self.workers.close()
        self.found["training_pauses"] = len(self.workers.pauses)
        print(f"  one state {took:.1f} s after the last change, all connected {connected:.1f} s later; browsers at "
              f"{self.watchers.places}", flush=True)  # fmt: skip
        self._stop_training(faults)
        self._count_credit(faults)
        faults.within(lambda: common_state_hash(self.sites), "one state after training", 60)
        lost = {
            each.name: each.require("lacks", digests=list(self.changes.accepted))["lacks"]
            for each in self.sites
        }
        rows = [each.require("rows") for each in self.sites]
        self.found |= {
            "mirrors": MIRRORS,
            "one_state_hash": common_state_hash(self.sites) is not None,
            "one_set_of_rows": len({each["rows"] for each in rows}) == 1,
            "lost_changes": len({name for names in lost.values() for name in names}),
            "accepted_changes": sum(self.changes.made.values()),
            "events": len(self.changes.accepted),
            "accepted_at": dict(self.changes.made),
            "refused_at": dict(self.changes.refused),
            "unexpected_refusals": self.changes.unexpected[:5],
            "converged_s": max(faults.converged.values(), default=took),
            "converged": faults.converged,
            "hostile": faults.answers,
            "watchers_longest_silence_s": round(max(each.longest for each in self.watchers.all), 1),
            "watchers_moves": sum(each.moves for each in self.watchers.all),
            "missed": faults.missed,
        }

    def _reporting(self) -> int:
        """Machines that some mirror has heard of within ten seconds."""
        heard: set[str] = set()
        for each in self.sites:
            members = each.require("members", run=self.workers.run)["members"]
            heard |= {
                key for key, (ago, activity) in members.items() if ago < 10 and activity != "left"
            }
        return len(heard & {self.workers.key(n) for n in self.workers.numbers})

    def _stop_training(self, faults: Faults) -> None:
        """The owner pauses the run at one mirror; the machines hear of it from theirs, and end with one ledger."""
        self.sites[1].require("act", run=self.workers.run, action="pause")

        def one_ledger() -> bool:
            said = [self.workers.status(n) or {} for n in self.workers.numbers]
            return (
                all(each.get("activity") == "paused" for each in said)
                and len(set(self.workers.ledgers())) == 1
            )

        self.found["paused_s"] = round(
            faults.within(one_ledger, "one ledger after the pause", 120), 1
        )

    def _count_credit(self, faults: Faults) -> None:
        tokens = self.workers.ledgers()[0][0]

        def sums() -> list[int]:
            return [each.require("credit", run=self.workers.run)["sum"] for each in self.sites]

        took = faults.within(
            lambda: set(sums()) == {tokens}, "credit that equals the ledger", CREDITED
        )
        self.found |= {
            "credit_equals_ledger": set(sums()) == {tokens},
            "ledger_tokens": tokens,
            "credit_tokens": sums(),
            "credited_s": round(took, 1),
        }


def main() -> None:
    asked = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    asked.add_argument("--quick", action="store_true")
    asked.add_argument("--seed", type=int, default=1)
    asked.add_argument(
        "--only", default="", help="the faults whose names hold one of these words: killed,disk"
    )
    asked.add_argument(
        "--keep", type=Path, help="leave the mirrors' and machines' folders and logs here"
    )
    told = asked.parse_args()
    os.environ |= {  # this process speaks with no database: the settings are not to start one
        "DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none", "REDIS_URL": "redis://127.0.0.1:1/0",
        "DJANGO_SETTINGS_MODULE": "coordinator.settings", "BARNRAISE_LOG": "WARNING", "NO_PROXY": "*",
    }  # fmt: skip
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit("stopped")
    )  # past the end of the drill, not around it
    with ExitStack() as leave:
        name = told.keep or leave.enter_context(
            tempfile.TemporaryDirectory(prefix="barnraise-mirrors-", ignore_cleanup_errors=True)
        )
        Path(name).mkdir(parents=True, exist_ok=True)
        Path(name).chmod(0o755)  # where root runs it, Postgres has a user of its own
        with Drill(Path(name), QUICK if told.quick else Span(), told.seed) as drill:
            drill.raise_mirrors()
            drill.start_training()
            drill.end(drill.afflict(told.only))
    wanted = ("mirrors", "one_state_hash", "lost_changes", "training_pauses", "workers_connected", "watchers_connected",
              "credit_equals_ledger", "converged_s")  # fmt: skip
    print(json.dumps({name: drill.found.get(name) for name in wanted} | drill.found))
    if drill.found["missed"] or drill.found["lost_changes"]:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
