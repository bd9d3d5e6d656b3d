"""Test what the exchange survives, with real workers over iroh: `make drill-exchange`.

Four workers train one small GPT on this machine, and no coordinator answers them. They are killed
at random moments, frozen, cut off from each other and joined late; bits flip on disk and in memory;
a disk fills, a clock is wrong, a folder is restored from an old backup, a hostile peer attacks, and
one volunteer's noise is retracted. At the end every announced update is on every machine, and all
anchors have the same bits. See docs/benchmarks/exchange_drill.md.

The script prints a line for each trial, and one JSON object as its last line. `--quick`: fewer
kills and shorter waits. `--profile` shows where the exchange's threads spend their time. `--width`
trains another model; the exchange's share of the CPU falls with its size (`--only nothing`).
"""

import argparse
import asyncio
import json
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))

from child_processes import ChildProcesses, OverdueError, Progress
from drill_machine import (
    FORK,
    RECIPE,
    UPLINK,
    DrillMachine,
    DrillWorld,
    flip_bit,
    forked_authors,
    last_update,
    recompute_anchor_digest,
)
from drill_worker import PROFILE
from hostile_peer import Attacker
from joined_run import MIRROR, RUN
from run_text import TEXT, prepare_text
from thread_profile import format_profiles

from barnraise.cli.verdict import build_verdict
from barnraise.durable_io import write_atomically
from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.protocol import messages
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import ModelSpec, RunSpec

MODEL = ModelSpec(layers=4, width=128, heads=4, context=128, vocabulary=256)
# If the machines make no step for so long, nothing more is waited for; see `AvailableClock`.
STALL_SECONDS = 120.0
HOUR = 3600.0
MIN_MEASURED_UPDATES = 3  # of each machine, during which CPU shares are measured
# The last line has these keys even if their trial was not run.
REQUIRED_RESULTS = (
    "agree",
    "kills",
    "lost_updates",
    "partitions_healed",
    "corruptions_found",
    "hostile_refused",
    "poison_subtracted_exactly",
    "exchange_cpu_share",
    "uplink_share",
)


@dataclass(frozen=True)
class Durations:
    """How long the trials last, in seconds, and how many kills there are.

    What must follow a trial is waited for, and may take longer.
    """

    kills: int = 50
    between_kills: float = 1.5  # on average
    steady: float = 45.0
    frozen: float = 60.0
    partition: float = 20.0


QUICK = Durations(kills=6, steady=15.0, frozen=10.0, partition=15.0)
FULL = Durations()


class Drill:
    """The machines, what is done to them, and what was measured."""

    def __init__(
        self,
        children: ChildProcesses,
        folder: Path,
        durations: Durations,
        model: ModelSpec,
        seed: int,
    ) -> None:
        """Prepare the text and the run's specification.

        Args:
            children: watches and ends the machines' processes.
            folder: holds everything; empty.
            durations: how long the trials last.
            model: what is trained.
            seed: decides which machines are killed when.
        """
        self.children = children
        self.folder = folder
        self.durations = durations
        self.random = random.Random(seed)
        text = folder / "text"
        signed = prepare_text(text, MIRROR)
        self.spec = RunSpec(
            model,
            TEXT,
            RECIPE,
            seed=7,
            owner=MIRROR.key,
            roots=(MIRROR.key,),
            manifest=digest(signed.body),
        )
        self.machines: list[DrillMachine] = []
        self.world = DrillWorld(
            children, folder, text, self.spec, signed.model_dump_json(), self.machines
        )
        self.results: dict[str, Any] = {
            "kills": 0,
            "partitions_healed": 0,
            "corruptions_found": 0,
        }

    def add_machine(self, name: str) -> DrillMachine:
        """Create a machine, which the machines started later know."""
        machine = DrillMachine(self.world, name)
        self.machines.append(machine)
        return machine

    # ---- waiting ------------------------------------------------------------------------------

    def wait_until(self, happened: Callable[[], object], event: str, rounds: int = 60) -> None:
        """Wait until `happened` returns true, as long as the machines train on.

        Args:
            happened: called ten times a second.
            event: names it where it does not happen.
            rounds: that an average machine trains before it should have happened.
        """
        progress = Progress(self.count_rounds, rounds)
        try:
            self.children.wait_until(happened, event, STALL_SECONDS, progress)
        except OverdueError as error:
            raise OverdueError(f"{error}\n{self.describe_machines()}") from None

    def count_rounds(self) -> float:
        """Count the rounds that an average machine has trained."""
        steps = sum(machine.status.get("step", 0) for machine in self.machines)
        return steps / RECIPE.round_steps / len(self.machines)

    def describe_machines(self) -> str:
        """Return the status and the end of the log of every machine."""
        return "\n".join(f"{m.name}: {m.status}\n{m.log_tail()}" for m in self.machines)

    def wait_for_updates(self, machines: list[DrillMachine], count: int = 1) -> None:
        """Wait until each of these machines has published `count` more updates."""
        goals = {m.name: m.updates_sent + count for m in machines}
        self.wait_until(
            lambda: all(m.updates_sent >= goals[m.name] for m in machines),
            "new updates of each",
        )

    def wait_for_rounds(self, machines: list[DrillMachine], count: int) -> None:
        """Wait until each machine has trained `count` more rounds, of several updates each."""
        goals = {
            m.name: m.status["step"] + count * m.status["exchange"]["round_steps"] for m in machines
        }
        self.wait_until(
            lambda: all(m.status["step"] >= goals[m.name] for m in machines),
            "new rounds of each",
        )

    def wait_until_synced(self, machines: list[DrillMachine]) -> None:
        """Wait until each machine has what each has published so far."""
        published = published_updates(machines)

        def is_synced() -> bool:
            for machine in machines:
                with machine.open_ledger() as ledger:
                    if not ledger.has_received(published):
                        return False
            return True

        self.wait_until(is_synced, "everybody's updates with everybody")

    # ---- the trials ---------------------------------------------------------------------------

    def run_undisturbed(self, four: list[DrillMachine]) -> None:
        """Measure what the exchange costs while nothing happens."""
        self.wait_for_updates(four, 2)
        cpu_before = [machine.read_cpu() for machine in four]
        bytes_before = [machine.status["peer_bytes_sent"] for machine in four]
        published_before = [machine.count_published() for machine in four]
        started = time.monotonic()
        goals = {machine.name: machine.updates_sent + MIN_MEASURED_UPDATES for machine in four}
        self.children.sleep(self.durations.steady)
        self.wait_until(
            lambda: all(machine.updates_sent >= goals[machine.name] for machine in four),
            "updates of each to measure",
        )
        seconds = time.monotonic() - started

        cpu_shares, uplink_shares = [], []
        parts: dict[str, float] = defaultdict(float)
        for machine, before, sent_before in zip(four, cpu_before, bytes_before, strict=True):
            now = machine.read_cpu()
            exchange = now["exchange"] - before["exchange"]
            training = now["all"] - before["all"] - exchange
            cpu_shares.append(exchange / training)
            for part, part_seconds in now["parts"].items():
                spent = part_seconds - before["parts"].get(part, 0.0)
                parts[part] += spent / training / len(four)
            sent = machine.status["peer_bytes_sent"] - sent_before
            uplink_shares.append(sent / seconds / UPLINK)
        published = [machine.count_published() for machine in four]
        steps = sum(s for s, _ in published) - sum(s for s, _ in published_before)
        rounds = sum(r for _, r in published) - sum(r for _, r in published_before)
        self.results |= {
            "exchange_cpu_share": round(median(cpu_shares), 4),
            "uplink_share": round(max(uplink_shares), 3),
            "exchange_cpu_parts": {
                part: round(share, 4)
                for part, share in sorted(parts.items(), key=lambda item: -item[1])
            },
            "parameters": self.spec.model.parameters,
            "round_steps": round(steps / rounds, 1),
        }
        if self.world.setup_changes["profiled"]:
            print(format_profiles(m.state_dir.path / PROFILE for m in four), flush=True)

    def kill_machines(self, four: list[DrillMachine]) -> None:
        """Kill random machines at random moments; each starts again within a second."""
        for number in range(self.durations.kills):
            time.sleep(self.random.expovariate(1 / self.durations.between_kills))
            victim = self.random.choice(four)
            victim.send_signal(signal.SIGKILL)
            victim.wait_for_exit()
            time.sleep(self.random.random())
            victim.start()
            self.results["kills"] = number + 1
        self.wait_for_updates(four)
        self.wait_until_synced(four)

    def freeze_machine(self, four: list[DrillMachine]) -> None:
        """Stop one machine's process for a while; it must catch up."""
        frozen = four[1]
        others = [machine for machine in four if machine is not frozen]
        frozen.send_signal(signal.SIGSTOP)
        self.wait_for_updates(others, 1)
        time.sleep(self.durations.frozen)
        frozen.send_signal(signal.SIGCONT)
        self.wait_for_updates(four)
        self.wait_until_synced(four)

    def partition_network(self, four: list[DrillMachine]) -> None:
        """Cut the network between two halves; both must go on, and then agree."""
        halves = four[:2], four[2:]
        for half, other in (halves, halves[::-1]):
            other_keys = json.dumps([machine.key for machine in other])
            for machine in half:
                machine.write_order("severed", other_keys)
        self.children.sleep(self.durations.partition)

        def both_went_on() -> bool:
            with four[0].open_ledger() as one, four[3].open_ledger() as two:
                return not (one.has_received(two.vector()) or two.has_received(one.vector()))

        self.wait_until(both_went_on, "updates of both halves")
        for machine in four:
            machine.remove_order("severed")
        self.wait_for_updates(four)
        self.wait_until_synced(four)
        self.results["partitions_healed"] = 1

    def join_late(self) -> None:
        """Let a machine join that has neither text nor weights."""
        joiner = self.add_machine("late")
        shutil.rmtree(joiner.folder / "blobs")
        joiner.start()
        self.wait_for_updates([joiner])
        assert "took the anchor at" in joiner.log_text(), joiner.log_tail()
        joiner.leave()

    def set_clock_ahead(self, four: list[DrillMachine]) -> None:
        """Let a machine train with its clock an hour ahead; its updates wait for their time."""
        victim = self.machines[-1]
        if victim in four:
            victim = self.add_machine("early")
        victim.start(clock_offset=HOUR)
        self.wait_for_updates([victim])
        self.wait_until(
            lambda: all("states a time that is" in machine.log_text() for machine in four),
            "its update with the others, which hold it back",
        )
        victim.leave()
        self.wait_until_synced(four)

    def corrupt_data(self, four: list[DrillMachine]) -> None:
        """Flip a bit in an anchor in memory, in a payload's file and in a saved state."""
        first, second, third = four[:3]
        for machine in (first, second):
            machine.write_order("hurry")
        self.wait_for_updates(four, 1)
        first.write_order("flip")
        self.wait_until(lambda: "is whole again" in first.log_text(), "the anchor's repair")
        self.results["corruptions_found"] += 1

        flip_bit(stored_payload(second))
        self.wait_until(lambda: "came again, whole" in second.log_text(), "the payload's repair")
        self.results["corruptions_found"] += 1
        for machine in (first, second):
            machine.remove_order("hurry")

        third.leave()
        checkpoints = (third.folder / "checkpoint").glob("?/*.safetensors")
        flip_bit(max(checkpoints, key=lambda path: path.stat().st_mtime))
        third.start()
        self.wait_until(
            lambda: "is damaged and not used" in third.log_text(), "the older state's use"
        )
        self.results["corruptions_found"] += 1
        self.wait_for_updates([third])
        self.wait_until_synced(four)

    def fill_disk(self, victim: DrillMachine) -> None:
        """Let no file grow past 20 kB: the worker must stop with a sentence, and start again."""
        assert victim.process is not None and victim.process.pid is not None
        # The limit applies to the log too, which must hold the last sentence.
        victim.clear_log()
        limits = (20_000, resource.RLIM_INFINITY)
        resource.prlimit(victim.process.pid, resource.RLIMIT_FSIZE, limits)
        victim.wait_for_exit()
        assert "join again" in victim.log_text(), victim.log_tail()
        victim.start()
        self.wait_for_updates([victim])

    def start_twice(self, victim: DrillMachine) -> None:
        """Start a second worker on the same folder, which must be refused."""
        status = victim.start_second()
        log_tail = victim.log_tail()
        assert status == 1 and "another" in log_tail, log_tail

    def restore_backup(self, four: list[DrillMachine]) -> None:
        """Replace a folder by an old copy that publishes before it reaches a peer.

        So it contradicts its own updates: a fork, which every machine must prove and cut.
        """
        victim, others = four[3], four[:3]
        victim.leave()
        backup = self.folder / "backup"
        shutil.copytree(victim.folder, backup)
        victim.start()
        self.wait_for_updates([victim], 2)
        self.wait_until_synced(four)
        victim.leave()
        shutil.rmtree(victim.folder)
        backup.rename(victim.folder)
        other_keys = [machine.key for machine in self.machines if machine is not victim]
        victim.write_order("severed", json.dumps(other_keys))
        victim.start()
        self.wait_for_updates([victim], 2)
        victim.remove_order("severed")

        def proven_forks() -> set[str]:
            return {author for machine in others for author in forked_authors(machine)}

        self.wait_until(proven_forks, "the proof of the fork")
        self.wait_until(
            lambda: all(forked_authors(machine) for machine in four), "the proof everywhere"
        )
        self.wait_for_updates(four)
        self.results["forks_cut"] = len(proven_forks())

    def attack(self, victim: DrillMachine) -> None:
        """Let a hostile peer with a valid ticket attack; nothing may enter the ledger."""
        with victim.open_ledger() as ledger:
            header, update = next(
                (signed, update)
                for signed, update in ledger.updates_since({})
                if update.peer != victim.key
            )
            ticket = ledger.tickets.get(update.ticket)
            assert ticket is not None
            sample = messages.UpdatePush(header=header, ticket=ticket)
            authors_before = set(ledger.vector())
        address = messages.Peer(key=victim.key, addresses=[f"127.0.0.1:{victim.port}"])
        attacker = Attacker(self.spec, address, sample)
        answers = asyncio.run(attacker.run())
        for name, reason in answers.items():
            print(f"    an update {name}: {reason or 'NOT REFUSED'}")
        with victim.open_ledger() as ledger:
            new_authors = set(ledger.vector()) - authors_before
        entered = {a for a in new_authors if a.startswith(attacker.identity.key)}
        assert not entered, "a hostile update went in"
        self.wait_for_updates([victim])
        self.results["hostile_refused"] = sum(map(bool, answers.values()))
        self.results["hostile_sent"] = len(answers)

    def retract_poison(self, four: list[DrillMachine]) -> None:
        """Let one more volunteer publish noise, and retract it by a verdict."""
        poisoner = self.add_machine("poisoner")
        poisoner.start()
        self.wait_for_updates([poisoner])
        loss_before = median(machine.loss for machine in four)
        last_good = poisoner.updates_sent
        poisoner.write_order("poison")
        self.wait_until(lambda: poisoner.updates_sent >= last_good + 3, "its poison")
        self.wait_until(lambda: four[0].loss > loss_before * 1.05, "a higher loss of the others")
        poisoner.leave()
        with poisoner.open_ledger() as ledger:
            author = next(a for a in ledger.vector() if a.startswith(poisoner.key))
        self._publish_verdict(four[0], author, last_good)

        def is_retracted() -> bool:
            return all(
                "nothing after update" in machine.log_text()
                and last_update(machine, author) <= last_good
                for machine in four
            )

        self.wait_until(is_retracted, "the verdict with everybody")
        self.wait_for_rounds(four, 5)
        loss_after = median(machine.loss for machine in four)
        healed = loss_after <= loss_before * 1.01
        self.results |= {
            "loss_before_poison": loss_before,
            "loss_five_rounds_later": loss_after,
            "healed": healed,
        }
        assert healed, f"the loss was {loss_before:.4f} before the poison and is {loss_after:.4f}"

    def _publish_verdict(self, machine: DrillMachine, author: str, last_good: int) -> None:
        """Sign a verdict that retracts an author's updates after `last_good`."""
        with machine.open_ledger() as ledger:
            horizon = self.spec.verdict_horizon
            verdict = build_verdict(ledger, RUN, {author: last_good}, {}, horizon, "noise")
        signed = MIRROR.sign("verdict", verdict)
        ruling = SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})
        path = machine.folder / VERDICT_FOLDER / "ruling.json"
        write_atomically(path, ruling.model_dump_json().encode())

    def finish(self, four: list[DrillMachine]) -> None:
        """Let all leave at once and return to a finished run; compare and recompute the anchors."""
        for machine in four:
            machine.send_signal(signal.SIGINT)
        for machine in four:
            machine.wait_for_exit()
        announced = published_updates(four)
        for machine in four:
            machine.start(finished=True)
        for machine in four:
            machine.wait_for_success()
        lost = 0
        for machine in four:
            with machine.open_ledger() as ledger:
                lost += sum(max(0, n - ledger.head(a).seq) for a, n in announced.items())
        ends = {(machine.status["vector"], machine.status["anchor"]) for machine in four}
        self.results |= {
            "lost_updates": lost,
            "agree": len(ends) == 1,
            "poison_subtracted_exactly": all(
                recompute_anchor_digest(machine) == machine.status["anchor"] for machine in four
            ),
        }

    def trials(self, four: list[DrillMachine]) -> list[tuple[str, Callable[[], None]]]:
        """Return all trials in order, with their names."""
        north, _, _, west = four
        return [
            ("nothing happens", lambda: self.run_undisturbed(four)),
            (f"{self.durations.kills} kills", lambda: self.kill_machines(four)),
            ("one is frozen", lambda: self.freeze_machine(four)),
            ("the network falls apart, and heals", lambda: self.partition_network(four)),
            ("a late joiner", self.join_late),
            ("a clock an hour off", lambda: self.set_clock_ahead(four)),
            ("bits flip in memory and on disk", lambda: self.corrupt_data(four)),
            ("a disk is full", lambda: self.fill_disk(west)),
            ("two workers on one folder", lambda: self.start_twice(north)),
            ("a hostile peer", lambda: self.attack(north)),
            ("an old backup", lambda: self.restore_backup(four)),
            ("poison, and a verdict", lambda: self.retract_poison(four)),
            ("the end", lambda: self.finish(four)),
        ]

    def run_trial(self, name: str, trial: Callable[[], None]) -> None:
        """Run a trial, and print how long it took and what it measured."""
        started = time.monotonic()
        results_before = dict(self.results)
        print(f"  {name} …", flush=True)
        trial()
        print(f"  {name}: survived, {time.monotonic() - started:.0f} s", flush=True)
        for key, result in self.results.items():
            if results_before.get(key) != result:
                print(f"    {key}: {result}", flush=True)


def published_updates(machines: list[DrillMachine]) -> dict[str, int]:
    """Return the last number of each author that is one of these machines."""
    published: dict[str, int] = {}
    for machine in machines:
        with machine.open_ledger() as ledger:
            vector = ledger.vector()
        published |= {a: n for a, n in vector.items() if a.startswith(machine.key)}
    return published


def stored_payload(machine: DrillMachine) -> Path:
    """Return the path of a payload that the machine stores."""
    with machine.open_ledger() as ledger:
        for _, update in ledger.updates_since({}):
            part = update.fragments[0]
            if part.size and ledger.blobs.has(part.digest):
                return ledger.blobs.path(part.digest)
    raise AssertionError(f"{machine.name} stores no payload")


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Test what the exchange survives.")
    parser.add_argument("--quick", action="store_true", help="fewer kills, shorter waits")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=MODEL.width, help="of the model")
    parser.add_argument(
        "--profile", action="store_true", help="profile the exchange's threads in the first trial"
    )
    parser.add_argument(
        "--only",
        default="",
        help="only trials whose names contain one of these words, as in: bits,full",
    )
    return parser.parse_args()


def main() -> None:
    """Run the chosen trials."""
    arguments = parse_arguments()
    FORK.set_forkserver_preload(["drill_worker"])
    words = [word for word in arguments.only.split(",") if word]
    with ExitStack() as cleanup:
        folder = Path(
            cleanup.enter_context(
                tempfile.TemporaryDirectory(prefix="barnraise-drill-", ignore_cleanup_errors=True)
            )
        )
        drill = Drill(
            ChildProcesses(folder, cleanup),
            folder,
            QUICK if arguments.quick else FULL,
            replace(MODEL, width=arguments.width),
            arguments.seed,
        )
        drill.world.setup_changes["profiled"] = arguments.profile
        four = [drill.add_machine(name) for name in ("north", "east", "south", "west")]
        for machine in four:
            machine.start()
        for name, trial in drill.trials(four):
            if not words or any(word in name for word in words):
                drill.run_trial(name, trial)
    print(json.dumps({key: drill.results.get(key) for key in REQUIRED_RESULTS} | drill.results))


if __name__ == "__main__":
    main()
