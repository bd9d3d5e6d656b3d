"""Test what strangers can do to a run and to a site: `make drill-strangers`.

Three honest workers of three volunteers train one small GPT over iroh, first alone and then among
strangers, whose tickets are valid and who lie, flood and isolate as well as they can. Then the
run's owner excludes the strangers, and every honest machine must hold, bit for bit, the initial
weights plus the updates of the honest. On a real site, accounts without computers lie about a
run's count and about credit. See docs/benchmarks/strangers.md.

The script prints a line for each trial, and one JSON object as its last line. It exits with 1 if a
required value is not reached. `--quick`: a shorter training and shorter floods.
"""

import argparse
import json
import math
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median, quantiles
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "shared"))
sys.path.append(str(Path(__file__).resolve().parents[1] / "drills"))

import drill_machine
import owner_files
import torch
from arrival_log import Arrival, count_missing, measure_delays, read_arrivals
from attack_process import AttackProcess, attack_setup
from child_processes import ChildProcesses, OverdueError, Progress
from drill_machine import FORK, DrillMachine, DrillWorld, recompute_anchor_digest
from harmful_windows import HarmfulWindows
from joined_run import MIRROR, RUN
from loss_curve import read_curve, relative_gap
from run_text import TEXT, prepare_text
from stranger import EXPELLED_MIRROR, ROGUE_MIRROR
from swarm_samples import SwarmSamples
from sybil_snapshot import ATTACK, SybilScale, count_moved_machines

from barnraise.cli.verdict import build_exclusion, find_excluded
from barnraise.durable_io import write_atomically
from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.ledger.anchor import TokenClaim, count_tokens
from barnraise.protocol import messages, mirror_list
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.spec import ModelSpec, RunSpec

MODEL = ModelSpec(layers=2, width=64, heads=2, context=64, vocabulary=256)
RECIPE = replace(drill_machine.RECIPE, step_sequences=8, evaluate_every=20_000)
STEP_TOKENS = RECIPE.step_sequences * MODEL.context
SITE_DRILL = Path(__file__).parents[1] / "site" / "drill_liars.py"
OWNER = Identity(b"o" * 32)
MIRROR_THRESHOLD = 2  # of three mirrors, as a site pins it at a run's launch
TICKET_MARGIN = 2  # a site's ticket allows so many times what its machine trains
CLAIMED_SPEED = 10  # honest machines' tickets that the ticket of the useless stranger permits
REST_SECONDS = 0.02  # after each step: a volunteer's machine leaves its other programs some room
UPLINK = 5_000_000  # bytes per second: every link that receives updates costs some of it
HONEST_NAMES = ("north", "east", "south")
# Without any step of an honest machine for so long the drill fails; see `AvailableClock`.
STALL_SECONDS = 90.0
STEP_PROGRESS = 1e-6  # what a step counts next to an update
# What must be reached.
MAX_LOSS_GAP = 0.01
MAX_DELAY_RATIO = 2.0
MAX_GROWTH_MB = 50.0


@dataclass(frozen=True)
class Scale:
    """How long the drill trains and floods.

    Attributes:
        tokens: Honest tokens of each of the two runs.
        flood_updates: Honest updates that each flood lasts.
        quiet_updates: Honest updates over which the quiet delay is measured.
        judged_tokens: Of each training in which machines judge strangers.
        references: Such trainings without strangers; they differ by half a percent.
    """

    tokens: int
    flood_updates: int
    quiet_updates: int
    judged_tokens: int
    references: int


QUICK = Scale(900_000, flood_updates=18, quiet_updates=30, judged_tokens=600_000, references=2)
FULL = Scale(2_000_000, flood_updates=100, quiet_updates=150, judged_tokens=2_700_000, references=4)


@dataclass(frozen=True)
class Window:
    """A part of a run.

    Attributes:
        name: Its name.
        since: Its begin, in seconds since 1970.
        until: Its end.
        steps: Steps of all honest machines in it.
    """

    name: str
    since: float
    until: float
    steps: int


class Swarm:
    """Honest machines of one run, and what is measured of them."""

    def __init__(self, world: DrillWorld, names: Sequence[str] = HONEST_NAMES) -> None:
        """Create the machines, one for each volunteer."""
        self.world = world
        self.windows: list[Window] = []
        self.machines = world.machines
        for name in names:
            self.machines.append(DrillMachine(world, name))
        self.samples = SwarmSamples(self.machines)
        self.attacks: list[AttackProcess] = []

    def start(self) -> None:
        """Start all machines and the samples."""
        for machine in self.machines:
            machine.start()
        self.samples.start()

    @property
    def keys(self) -> set[str]:
        """Keys of the honest machines."""
        return {machine.key for machine in self.machines}

    # ---- waiting ------------------------------------------------------------------------------

    def wait_until(
        self, happened: Callable[[], object], event: str, most: float = math.inf
    ) -> None:
        """Wait until `happened` returns true, as long as the honest machines train on.

        Args:
            happened: Called four times a second.
            event: What does not happen, for the message.
            most: Honest updates after which it should have happened.

        Raises:
            ChildDiedError: If a process died.
            OverdueError: If no machine makes a step, or it takes too long.
        """
        progress = Progress(self._count_progress, most)
        try:
            self.world.children.wait_until(happened, event, STALL_SECONDS, progress)
        except OverdueError as error:
            raise OverdueError(f"{error}\n{self.describe_machines()}") from None

    def _count_progress(self) -> float:
        """Count the updates, and as a fraction the steps: any step is progress."""
        return self.count_updates() + self.count_steps() * STEP_PROGRESS

    def describe_machines(self) -> str:
        """Return the status and the end of the log of every machine."""
        return "\n".join(f"{m.name}: {str(m.status)[:600]}\n{m.log_tail()}" for m in self.machines)

    def count_steps(self) -> int:
        """Count the steps of all machines."""
        return sum(machine.status.get("step", 0) for machine in self.machines)

    def count_updates(self) -> int:
        """Count the updates that the honest machines have published."""
        return sum(machine.updates_sent for machine in self.machines)

    def honest_tokens(self) -> int:
        """Count the tokens of the honest in the ledger that has fewest of them."""
        counts = []
        for machine in self.machines:
            with machine.open_ledger() as ledger:
                heads = ledger.last_updates()
            counts.append(sum(u.total for u in heads.values() if u.peer in self.keys))
        return min(counts)

    # ---- windows ------------------------------------------------------------------------------

    def record_window(self, name: str, updates: int) -> Window:
        """Let the honest machines publish so many updates; record that as a window."""
        since, first, steps = time.time(), self.count_updates(), self.count_steps()
        self.wait_until(lambda: self.count_updates() >= first + updates, name)
        window = Window(name, since, time.time(), self.count_steps() - steps)
        self.windows.append(window)
        return window

    def delays(self, window: Window) -> list[float]:
        """Return the delays of honest updates that were published in a window, in seconds."""
        return measure_delays(self._read_all_arrivals(), window.since, window.until)

    def missing(self, window: Window) -> int:
        """Count the honest updates that were published in a window and have not reached all."""
        return count_missing(self._read_all_arrivals(), window.since, window.until)

    def _read_all_arrivals(self) -> dict[str, list[Arrival]]:
        return {m.key: read_arrivals(m.state_dir.path / "arrivals") for m in self.machines}

    # ---- attacks ------------------------------------------------------------------------------

    def start_attack(self, attack: str, volunteer: str, rate: int, *extra: str) -> AttackProcess:
        """Start an attack on all machines."""
        victims = self.machines[:1] if attack == "eclipse" else self.machines
        folder = self.world.folder / "attacks" / volunteer
        spec = self.world.spec.to_json()
        process = AttackProcess(
            attack_setup(attack, volunteer, spec, victims, folder, rate, *extra),
            self.world.children,
        )
        self.attacks.append(process)
        return process

    def end_attack(self, attack: AttackProcess) -> None:
        """End an attack."""
        self.attacks.remove(attack)
        attack.end()


class StrangersDrill:
    """The two runs, the site, and what was measured."""

    def __init__(self, children: ChildProcesses, folder: Path, scale: Scale) -> None:
        """Prepare the text and the run's spec.

        Args:
            children: Watches and ends all processes.
            folder: Holds everything; empty.
            scale: How long the drill trains and floods.
        """
        self.children = children
        self.folder = folder
        self.scale = scale
        self.results: dict[str, Any] = {}
        self.shortfalls: list[str] = []
        self._text = folder / "text"
        signed = prepare_text(self._text, OWNER)
        self._manifest = signed.model_dump_json()
        self.spec = RunSpec(
            MODEL,
            TEXT,
            RECIPE,
            seed=7,
            owner=OWNER.key,
            roots=(MIRROR.key, ROGUE_MIRROR.key, EXPELLED_MIRROR.key),
            threshold=MIRROR_THRESHOLD,
            manifest=digest(signed.body),
            verdict_horizon=100_000,
        )
        self.mirror_lists = [build_mirror_list(1), build_mirror_list(2)]
        self.reference = self._make_swarm("reference")
        self.attacked = self._make_swarm("attacked")
        self.strangers: list[AttackProcess] = []  # all that were started
        self.quiet_delays: list[float] = []  # in both runs, before the strangers come
        self.names: list[str] = []  # of the attacks that were made
        self.rate = 0  # tokens per second that a site's ticket allows here

    def _make_swarm(
        self, name: str, names: Sequence[str] = HONEST_NAMES, budget: int = 0, **setup: Any
    ) -> Swarm:
        """Return a swarm in a folder of its own.

        Args:
            name: The folder's.
            names: The machines'.
            budget: Tokens of the run, where it has another budget.
            setup: Fields of the `Setup` of all machines that differ.
        """
        folder = self.folder / name
        folder.mkdir()
        spec = self.spec
        if budget:
            spec = replace(spec, recipe=replace(spec.recipe, token_budget=budget))
        lists = mirror_list.MirrorLists(lists=self.mirror_lists)
        changes = {
            "rest_seconds": REST_SECONDS,
            "uplink": UPLINK,
            "mirror_lists": lists.model_dump_json(),
            **setup,
        }
        return Swarm(self._make_world(folder, changes, spec), names)

    def _make_world(
        self, folder: Path, changes: dict[str, Any], spec: RunSpec | None = None
    ) -> DrillWorld:
        spec = spec or self.spec
        return DrillWorld(self.children, folder, self._text, spec, self._manifest, [], changes)

    def judge_strangers(self) -> None:
        """Let idle and harmful strangers among invited machines, and let no person act.

        Sybils with a snapshot, which mostly wait, attack others at the same time.
        """
        tokens, references = self.scale.judged_tokens, self.scale.references
        windows = HarmfulWindows(self._make_swarm, self.rate, tokens, references)
        waiting = ThreadPoolExecutor(1)
        try:
            sybils = waiting.submit(self.face_sybils)
            self.results |= windows.run()
            sybils.result()
        finally:
            waiting.shutdown(wait=False)
        self.names += ["idle accounts", *windows.names]
        for value in windows.shortfalls:
            self.require(False, value)

    # ---- trials -------------------------------------------------------------------------------

    def lie_to_site(self) -> None:
        """Let accounts without computers lie to a real site while an owner's files attack."""
        with subprocess.Popen(
            [sys.executable, SITE_DRILL], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                self.send_owner_files()
                output, _ = process.communicate()
            except BaseException:
                process.terminate()
                raise
        assert process.returncode == 0, f"the site's part failed:\n{output}"
        figures = json.loads(output.splitlines()[-1])
        self.names += ["sybil reports", "sybil credit"]
        self.results |= figures
        honest = figures["site_honest_count"]
        self.require(
            figures["site_count_after_lies"] == honest, f"the site counts {honest} after lies"
        )
        self.require(figures["site_honest_credit"] > 0, "the honest earn credit")
        self.require(figures["site_liars_credit"] == 0, "liars earn no credit")

    def send_owner_files(self) -> None:
        """Send a worker's code the attacks of a run's owner, a site or an on-path attacker."""
        results = owner_files.try_all_attacks()
        accepted = [name for name, result in results.items() if not result["refused"]]
        for name in accepted:
            print(f"    {name}: {results[name]}", flush=True)
        self.names.append("owner's files")
        self.results |= {
            "owner_bytes_refused": len(results) - len(accepted) if accepted else "all",
            "owner_bytes_tried": len(results),
        }
        self.require(not accepted, "owner_bytes_refused is all")

    def train_alone(self) -> None:
        """Train the reference, and measure the quiet delay."""
        swarm = self.reference
        swarm.start()
        first = self.scale.tokens // 3
        swarm.wait_until(lambda: swarm.honest_tokens() >= first, f"{first} tokens")
        quiet = swarm.record_window("quiet", self.scale.quiet_updates)
        swarm.wait_until(lambda: swarm.honest_tokens() >= self.scale.tokens, "the whole reference")
        speeds = [machine.status["rate"] for machine in swarm.machines]
        self.rate = math.ceil(TICKET_MARGIN * median(speeds))
        self.quiet_delays += swarm.delays(quiet)
        self.results |= {
            "quiet_steps_per_second": round(quiet.steps / (quiet.until - quiet.since), 1),
            "quiet_rss_growth_mb": round(swarm.samples.growth_mb(quiet.since, quiet.until), 1),
            "tokens_per_second": round(sum(speeds)),
            "ticket_tokens_per_second": self.rate,
        }
        for machine in swarm.machines:
            machine.leave()
        swarm.samples.stop()

    def train_among_strangers(self) -> None:
        """Train the same run among liars, and under one flood after the other."""
        swarm = self.attacked
        swarm.world.setup_changes["max_tokens_per_second"] = self.rate
        swarm.start()
        swarm.wait_until(lambda: swarm.count_updates() > 0, "the first update")
        self.quiet_delays += swarm.delays(swarm.record_window("quiet", self.scale.quiet_updates))
        swarm.windows.clear()
        self.launch_attack("phantom author", "mallory")
        self.launch_attack("inflated rate and tokens", "trudy")
        self.launch_attack("useless updates", "walter", speed=CLAIMED_SPEED)
        first = self.scale.tokens // 3
        swarm.wait_until(lambda: swarm.honest_tokens() >= first, f"{first} tokens among liars")
        swarm.record_window("liars", self.scale.flood_updates)
        floods = "eclipse", "state flood", "part flood", "empty updates", "hello flood", "requests"
        for flood in floods:
            attack = self.launch_attack(flood, "eve")
            swarm.wait_until(lambda a=attack: len(a.record["counts"]) > 0, f"the {flood}", 400)
            swarm.record_window(flood, self.scale.flood_updates)
            self.finish_attack(attack)
        attack = self.launch_attack("tokens beyond the ticket", "eve")
        swarm.wait_until(lambda: len(attack.record["counts"]) > 1, "tokens beyond the ticket", 400)
        swarm.wait_until(lambda: swarm.honest_tokens() >= self.scale.tokens, "the whole training")
        self.finish_attack(attack)
        self._compare_losses()
        self._compare_delays()

    def face_sybils(self) -> None:
        """Let more idle accounts than a machine has links name one snapshot of their own."""
        folder = self.folder / "sybils"
        folder.mkdir()
        changes = {"rest_seconds": REST_SECONDS, "uplink": UPLINK}
        changes["max_tokens_per_second"] = self.rate
        world = self._make_world(folder, changes)
        scale = SybilScale(self.scale.flood_updates, self.rate)
        moved = count_moved_machines(world, folder / "attacks", scale)
        self.names.append(ATTACK)
        self.results["moved_by_sybils"] = moved
        self.require(moved == 0, "idle accounts move no machine")

    def launch_attack(
        self, attack: str, volunteer: str, *extra: str, speed: int = 1
    ) -> AttackProcess:
        """Start an attack on the honest machines.

        Args:
            attack: Its name.
            volunteer: Whose it is.
            extra: Documents that it sends.
            speed: Multiplies the tokens per second that its tickets permit.
        """
        process = self.attacked.start_attack(attack, volunteer, speed * self.rate, *extra)
        self.strangers.append(process)
        self.names.append(attack)
        return process

    def finish_attack(self, attack: AttackProcess) -> None:
        """End an attack, and print what it did and how it was answered."""
        self.attacked.end_attack(attack)
        record = attack.record
        print(f"    {attack.setup.attack}: {record['counts']}", flush=True)
        for reason, count in sorted(record["refusals"].items(), key=lambda item: -item[1])[:4]:
            print(f"      refused {count} times: {reason}", flush=True)

    def _compare_losses(self) -> None:
        reference, attacked = (
            [read_curve(m.state_dir.path / "evaluations", swarm.keys) for m in swarm.machines]
            for swarm in (self.reference, self.attacked)
        )
        gap = relative_gap(reference, attacked)
        self.results |= {
            "learning_loss_gap": round(gap, 4),
            "reference_loss": round(median(curve[-1][1] for curve in reference), 4),
            "loss_among_strangers": round(median(curve[-1][1] for curve in attacked), 4),
        }
        self.require(gap <= MAX_LOSS_GAP, f"learning_loss_gap ≤ {MAX_LOSS_GAP}")

    def _compare_delays(self) -> None:
        swarm = self.attacked
        quiet = median(self.quiet_delays)
        self.results |= {
            "quiet_delay_ms": round(1000 * quiet, 1),
            "quiet_delay_p95_ms": round(1000 * quantiles(self.quiet_delays, n=20)[-1], 1),
        }
        ratios, growths, floods = {}, {}, {}
        for window in swarm.windows:
            delays = swarm.delays(window)
            ratios[window.name] = median(delays) / quiet
            growths[window.name] = swarm.samples.growth_mb(window.since, window.until)
            floods[window.name] = {
                "delay_ms": round(1000 * median(delays), 1),
                "delay_p95_ms": round(1000 * quantiles(delays, n=20)[-1], 1),
                "delay_ratio": round(ratios[window.name], 2),
                "missing": swarm.missing(window),
                "rss_growth_mb": round(growths[window.name], 1),
                "seconds": round(window.until - window.since, 1),
                "steps_per_second": round(window.steps / (window.until - window.since), 1),
            }
            print(f"    {window.name}: {floods[window.name]}", flush=True)
        self.results |= {
            "honest_update_delay_ratio": round(max(ratios.values()), 2),
            "rss_growth_mb": round(max(growths.values()), 1),
            "windows": floods,
        }
        for name in ratios:
            self.require(
                ratios[name] <= MAX_DELAY_RATIO, f"delay under {name} ≤ {MAX_DELAY_RATIO} × quiet"
            )
            self.require(growths[name] < MAX_GROWTH_MB, f"growth under {name} < {MAX_GROWTH_MB} MB")

    def join_under_flood(self) -> None:
        """Let a machine without weights join while phantoms offer theirs and hellos flood."""
        swarm = self.attacked
        flood = self.launch_attack("hello flood", "eve")
        self.names.pop()  # the same attack again
        joiner = DrillMachine(swarm.world, "late")
        swarm.machines.append(joiner)
        joiner.start()
        swarm.wait_until(lambda: joiner.updates_sent > 0, "the late machine's first update", 5_000)
        self.finish_attack(flood)

    def present_tickets(self) -> None:
        """Try tickets of others, expired ones and those of an expelled mirror; replay an update."""
        swarm = self.attacked
        with swarm.machines[0].open_ledger() as ledger:
            header, update = next(
                pair for pair in ledger.updates_since({}) if pair[1].peer in swarm.keys
            )
            ticket = ledger.tickets.get(update.ticket)
        assert ticket is not None
        sample = messages.UpdatePush(header=header, ticket=ticket)
        attack = self.launch_attack("replayed and foreign tickets", "eve", sample.model_dump_json())
        swarm.wait_until(lambda: attack.record["counts"].get("done"), "all tickets tried", 5_000)
        self.finish_attack(attack)
        counts, refusals = attack.record["counts"], attack.record["refusals"]
        refused = sum(n for name, n in refusals.items() if name != "replay")
        self.results |= {"tickets_tried": counts["tickets tried"], "tickets_refused": refused}
        self.require(refused == counts["tickets tried"], "every false ticket is refused")

    def rule_falsely(self) -> None:
        """Let one mirror, and one with an expelled one, erase all that the honest have trained."""
        swarm = self.attacked
        with swarm.machines[0].open_ledger() as ledger:
            authors = [u.author for u in ledger.last_updates().values() if u.peer in swarm.keys]
        rulings = [
            sign_verdict(erase_all(authors, version), *signers).model_dump_json()
            for version in (0, 1, 2)
            for signers in ((ROGUE_MIRROR,), (EXPELLED_MIRROR,), (ROGUE_MIRROR, EXPELLED_MIRROR))
        ]
        before = swarm.honest_tokens()
        attack = self.launch_attack("rogue and expelled mirror", "eve", *rulings)
        swarm.wait_until(
            lambda: attack.record["counts"].get("rulings", 0) >= len(rulings), "rulings sent", 5_000
        )
        first = swarm.count_updates()
        swarm.wait_until(lambda: swarm.count_updates() >= first + 20, "training after the rulings")
        self.finish_attack(attack)
        ruled = []
        for machine in swarm.machines:
            with machine.open_ledger() as ledger:
                if ledger.verdicts.rulings:
                    ruled.append(machine.name)
        self.results["false_rulings_applied"] = len(ruled)
        self.require(
            not ruled and swarm.honest_tokens() >= before, "no ruling of too few mirrors counts"
        )

    def undo_strangers(self) -> None:
        """Let a stranger poison the weights; then the owner excludes all strangers."""
        swarm = self.attacked
        attack = self.launch_attack("poison", "eve")
        swarm.wait_until(
            lambda: attack.record["counts"].get("published", 0) >= 3,
            "three poisoned updates",
            5_000,
        )
        self.finish_attack(attack)
        self._measure_stolen_tokens()
        for stranger in list(swarm.attacks):
            self.finish_attack(stranger)
        self._exclude_strangers()
        first = swarm.count_updates()
        swarm.wait_until(lambda: swarm.count_updates() >= first + 20, "training after the verdict")

    def stranger_authors(self, machine: DrillMachine) -> list[str]:
        """Return the authors in a machine's ledger that are not honest machines."""
        with machine.open_ledger() as ledger:
            return [a for a, u in ledger.last_updates().items() if u.peer not in self.attacked.keys]

    def _measure_stolen_tokens(self) -> None:
        """Measure what strangers' tokens exceed in any ledger: rate × time and one step."""
        stolen, claimed = 0, 0
        strangers = {key: s for s in reversed(self.strangers) for key in s.keys}
        for machine in self.attacked.machines:
            with machine.open_ledger() as ledger:
                heads = ledger.last_updates().items()
            for key, stranger in strangers.items():
                claims = {
                    author: TokenClaim(head.started_ms, head.time_ms, head.total)
                    for author, head in heads
                    if head.peer == key
                }
                tokens = count_tokens(claims)
                rate = stranger.setup.max_tokens_per_second
                allowed = rate * (time.time() - stranger.started_at) + STEP_TOKENS
                stolen += max(0, math.ceil(tokens - allowed))
                claimed = max(claimed, tokens)
        self.results |= {"budget_stolen_tokens": stolen, "tokens_a_stranger_stated": claimed}
        self.require(stolen == 0, "budget_stolen_tokens is 0")

    def _exclude_strangers(self) -> None:
        """Sign the owner's verdicts on all strangers, and wait until every machine obeys."""
        swarm = self.attacked
        machine = swarm.machines[0]
        with machine.open_ledger() as ledger:
            strange = {
                volunteer: author
                for author, volunteer in ledger.volunteers.items()
                if author.partition(".")[0] not in swarm.keys
            }
            verdicts = [
                build_exclusion(
                    ledger,
                    RUN,
                    find_excluded(ledger, "volunteer", author),
                    self.spec.verdict_horizon,
                    "a stranger",
                )
                for author in strange.values()
            ]
        for number, verdict in enumerate(verdicts):
            path = machine.folder / VERDICT_FOLDER / f"ruling-{number}.json"
            write_atomically(path, sign_verdict(verdict, OWNER).model_dump_json().encode())
        print(f"    the owner excludes {len(verdicts)} volunteers", flush=True)
        swarm.wait_until(
            lambda: not any(self.stranger_authors(m) for m in swarm.machines),
            "the verdicts with everybody",
            5_000,
        )

    def finish(self) -> None:
        """Let all leave and return to a finished run; recompute every anchor from files."""
        swarm = self.attacked
        swarm.samples.stop()
        for machine in swarm.machines:
            machine.send_signal(signal.SIGINT)
        for machine in swarm.machines:
            machine.wait_for_success()
        for machine in swarm.machines:
            machine.start(finished=True)
        for machine in swarm.machines:
            machine.wait_for_success()
        poisoned, not_undone = set(swarm.samples.divergent), set()
        vectors = {machine.name: read_vector(machine) for machine in swarm.machines}
        for machine in swarm.machines:
            # The late machine began at a snapshot, and lacks the files of the updates before it.
            source = swarm.machines[0] if machine.name == "late" else machine
            vector = vectors[machine.name]
            anchor = machine.status["anchor"]
            if anchor != recompute_anchor_digest(source, None, vector):
                poisoned.add(machine.name)
            if anchor != recompute_anchor_digest(source, swarm.keys, vector):
                not_undone.add(machine.name)
        undone = not not_undone
        behind = [name for name, vector in vectors.items() if vector != vectors[HONEST_NAMES[0]]]
        print(f"    other updates than {HONEST_NAMES[0]} have: {behind or 'nobody'}", flush=True)
        self.results |= {
            "weights_poisoned": len(poisoned),
            "isolated": len(swarm.samples.isolated),
            "machines_behind": len(behind),
            "undone": undone,
        }
        self.require(not poisoned, f"no weights are poisoned ({', '.join(sorted(poisoned))})")
        self.require(not swarm.samples.isolated, "no honest machine is isolated")
        self.require(
            undone,
            "every anchor is the initial weights and the honest updates "
            f"({', '.join(sorted(not_undone))})",
        )

    # ---- results ------------------------------------------------------------------------------

    def require(self, reached: bool, value: str) -> None:
        """Record and print a shortfall unless a required value is reached."""
        if not reached:
            self.shortfalls.append(value)
            print(f"    NOT REACHED: {value}", flush=True)

    def trials(self, without_site: bool) -> list[tuple[str, Callable[[], None]]]:
        """Return all trials in order, with their names."""
        return [
            ("an owner's files", self.send_owner_files if without_site else self.lie_to_site),
            ("three volunteers alone", self.train_alone),
            ("idle and harmful strangers", self.judge_strangers),
            ("the same among strangers", self.train_among_strangers),
            ("a machine joins under a flood", self.join_under_flood),
            ("false tickets", self.present_tickets),
            ("false rulings", self.rule_falsely),
            ("poison, and the owner's verdict", self.undo_strangers),
            ("the end", self.finish),
        ]

    def last_line(self) -> str:
        """Return the results as JSON, the required ones first."""
        keys = (
            "weights_poisoned",
            "learning_loss_gap",
            "budget_stolen_tokens",
            "isolated",
            "honest_update_delay_ratio",
            "rss_growth_mb",
            "undone",
            "moved_by_sybils",
            "owner_bytes_refused",
            "honest_share_of_budget",
            "newcomers_counted",
            "harmful_peak_gap",
            "harmful_end_gap",
            "rounds_to_suspension",
            "honest_suspended",
        )
        required = {"attacks": len(self.names)} | {key: self.results.get(key) for key in keys}
        return json.dumps(required | self.results | {"not_reached": self.shortfalls})

    def stop_samples(self) -> None:
        """Stop sampling the machines."""
        self.reference.samples.stop()
        self.attacked.samples.stop()


def read_vector(machine: DrillMachine) -> dict[str, int]:
    """Return the version vector of a machine's ledger."""
    with machine.open_ledger() as ledger:
        return ledger.vector()


def build_mirror_list(version: int) -> mirror_list.SignedMirrorList:
    """Return a mirror list: all three mirrors, from version 2 on without the expelled one."""
    now = time.time()
    expulsion = mirror_list.Expulsion(at=now, reason="it lied")
    entries = [
        mirror_list.MirrorEntry(
            key=identity.key,
            url=f"http://mirror{number}.example.org",
            name=f"Mirror {number}",
            admitted=now - 86400,
            expelled=expulsion if identity is EXPELLED_MIRROR and version > 1 else None,
        )
        for number, identity in enumerate((MIRROR, ROGUE_MIRROR, EXPELLED_MIRROR))
    ]
    mirrors = mirror_list.MirrorList(
        version=version, expires=now + 30 * 86400, threshold=1, roots=[OWNER.key], mirrors=entries
    )
    return mirror_list.add_signature(OWNER, mirror_list.unsigned_list(mirrors))


def erase_all(authors: list[str], version: int) -> Verdict:
    """Return a verdict, of a mirror list's version, that retracts everything of some authors."""
    fields = {
        "run": RUN,
        "after": dict.fromkeys(authors, 0),
        "mirror_list_version": version,
        "reason": "a mirror says so",
        "issued": time.time(),
    }
    return Verdict.model_validate(fields)


def sign_verdict(verdict: Verdict, *signers: Identity) -> SignedVerdict:
    """Return a verdict with signatures."""
    signed = [identity.sign("verdict", verdict) for identity in signers]
    return SignedVerdict(body=signed[0].body, signatures={s.key: s.signature for s in signed})


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description="Test what strangers can do to a run.")
    parser.add_argument("--quick", action="store_true", help="shorter training, shorter floods")
    parser.add_argument("--without-site", action="store_true", help="only the exchange's trials")
    return parser.parse_args()


def main() -> None:
    """Run all trials."""
    arguments = parse_arguments()
    torch.set_num_threads(1)  # the machines' processes need the cores
    FORK.set_forkserver_preload(["drill_worker", "stranger_attacks"])
    started = time.monotonic()
    with ExitStack() as cleanup:
        folder = Path(
            cleanup.enter_context(
                tempfile.TemporaryDirectory(
                    prefix="barnraise-strangers-", ignore_cleanup_errors=True
                )
            )
        )
        children = ChildProcesses(folder, cleanup)
        drill = StrangersDrill(children, folder, QUICK if arguments.quick else FULL)
        cleanup.callback(drill.stop_samples)
        for name, trial in drill.trials(arguments.without_site):
            trial_started = time.monotonic()
            print(f"  {name} …", flush=True)
            trial()
            seconds = time.monotonic() - trial_started
            print(f"  {name}: {seconds:.0f} s", flush=True)
    drill.results["seconds"] = round(time.monotonic() - started)
    print(drill.last_line())
    if drill.shortfalls:
        sys.exit(1)


if __name__ == "__main__":
    main()
