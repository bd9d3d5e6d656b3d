"""What the exchange survives, with real workers over iroh: `make drill-exchange`, docs/benchmarks/exchange_drill.md.

Four workers train one small GPT on this machine, and no coordinator answers them. They are killed at random moments,
frozen, cut off from each other and joined late; bits flip on the wire, on disk and in memory; a disk fills, a clock is
wrong, a folder is restored from an old backup, hostile peers send what they like, and one volunteer's poison is taken
out again. In the end every announced update is with every machine, and all anchors are the same bits. Prints a line a
trial, and one JSON object as its last line. `--quick`: fewer kills and shorter waits. `--width`: of another model; the
share of the exchange falls with its size (`--only nothing`).
"""

import argparse
import asyncio
import json
import random
import resource
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from drill_machine import FORK, UPLINK, Machine, World, added_up, flip, forked, last
from drill_worker import MIRROR, RUN
from hostile_peer import Attacker

from barnraise.cli.verdict import build_verdict
from barnraise.durable_io import write_atomically
from barnraise.exchange.handlers.verdict_handler import VERDICT_FOLDER
from barnraise.exchange.ledger.blob_store import BlobStore
from barnraise.protocol import messages
from barnraise.protocol.signing import digest
from barnraise.protocol.verdicts import SignedVerdict
from barnraise.spec import ModelSpec, Recipe, RunSpec, TextSpec
from barnraise.text import shards
from barnraise.text.sources import read_stdlib

MODEL = ModelSpec(layers=4, width=128, heads=4, context=128, vocabulary=256)
RECIPE = Recipe(
    token_budget=1 << 40, learning_rate=2e-3, schedule="constant", warmup_tokens=20_000, step_sequences=16,
    round_steps=30, codec="dense4", evaluate_every=150_000,
)  # fmt: skip


@dataclass(frozen=True)
class Span:
    """Seconds, and how many kills."""

    kills: int = 50
    between: float = 1.5  # two kills, on average
    steady: float = 45.0
    frozen: float = 60.0
    cut: float = 20.0


class Drill:
    def __init__(self, folder: Path, span: Span, model: ModelSpec, seed: int):
        self.folder, self.span, self.dice = folder, span, random.Random(seed)
        blobs = BlobStore(folder / "text")
        manifest = shards.prepare_text(
            TextSpec(tokenizer="bytes", shard_tokens=1 << 20),
            256,
            RUN,
            blobs.store,
            list(read_stdlib()),
        )
        signed = MIRROR.sign("manifest", manifest)
        self.spec = RunSpec(
            model, TextSpec(tokenizer="bytes"), RECIPE, seed=7, owner=MIRROR.key, roots=(MIRROR.key,),
            manifest=digest(signed.body),
        )  # fmt: skip
        self.machines: list[Machine] = []
        self.world = World(folder, blobs.folder, self.spec, signed.model_dump_json(), self.machines)
        self.found: dict[str, Any] = {"kills": 0, "partitions_healed": 0, "corruptions_found": 0}

    def machine(self, name: str) -> Machine:
        self.machines.append(Machine(self.world, name))
        return self.machines[-1]

    def until(self, happened: Callable[[], object], what: str, seconds: float = 90.0) -> None:
        end = time.monotonic() + seconds
        while not happened():
            assert time.monotonic() < end, f"not in {seconds:.0f} s: {what}\n{self.standing()}"
            time.sleep(0.1)

    def standing(self) -> str:
        return "\n".join(f"{m.name}: {m.status}\n{m.said()[-1500:]}" for m in self.machines)

    def grow(self, machines: list[Machine], by: int = 1, seconds: float = 120.0) -> None:
        """Each of these publishes so many more."""
        before = {each.name: each.sent for each in machines}
        self.until(
            lambda: all(m.sent >= before[m.name] + by for m in machines),
            "new updates of each",
            seconds,
        )

    def rounds(self, machines: list[Machine], count: int, seconds: float = 300.0) -> None:
        """Each trains so many rounds more; one that is said in turns has several updates."""
        goals = {
            m.name: m.status["step"] + count * m.status["exchange"]["round_steps"] for m in machines
        }
        self.until(
            lambda: all(m.status["step"] >= goals[m.name] for m in machines),
            "new rounds of each",
            seconds,
        )

    def together(self, machines: list[Machine], seconds: float = 120.0) -> None:
        """Each has got what each has published so far."""
        authors = {}
        for machine in machines:
            with machine.ledger() as ledger:
                authors |= {a: n for a, n in ledger.vector().items() if a.startswith(machine.key)}

        def reached() -> bool:
            for machine in machines:
                with machine.ledger() as ledger:
                    if not ledger.has_received(authors):
                        return False
            return True

        self.until(reached, "everybody's updates with everybody", seconds)

    # ---- the trials ------------------------------------------------------------------------------------------

    def steady(self, four: list[Machine]) -> None:
        """What trading costs while nothing happens."""
        self.grow(four, 2)
        first = [each.cpu() for each in four]
        bytes_first = [each.status["peer_bytes"] for each in four]
        published = [each.published() for each in four]
        began = time.monotonic()
        time.sleep(self.span.steady)
        took = time.monotonic() - began
        shares, lines, parts = [], [], Counter[str]()
        for each, then, sent in zip(four, first, bytes_first, strict=True):
            now = each.cpu()
            exchange, whole = now["exchange"] - then["exchange"], now["all"] - then["all"]
            shares.append(exchange / (whole - exchange))
            for part, seconds in now["parts"].items():
                parts[part] += (
                    (seconds - then["parts"].get(part, 0.0)) / (whole - exchange) / len(four)
                )
            lines.append((each.status["peer_bytes"] - sent) / took / UPLINK)
        self.found |= {
            "exchange_cpu_share": round(median(shares), 4),
            "uplink_share": round(max(lines), 3),
        }
        self.found["exchange_cpu_parts"] = {
            part: round(share, 4) for part, share in parts.most_common()
        }
        self.found["parameters"] = self.spec.model.parameters
        steps, rounds = (sum(each) for each in zip(*(m.published() for m in four), strict=True))
        before, earlier = (sum(each) for each in zip(*published, strict=True))
        self.found["round_steps"] = round((steps - before) / (rounds - earlier), 1)

    def kills(self, four: list[Machine]) -> None:
        for number in range(self.span.kills):
            time.sleep(self.dice.expovariate(1 / self.span.between))
            victim = self.dice.choice(four)
            victim.kill()
            victim.dead()
            time.sleep(self.dice.random())
            victim.start()
            self.found["kills"] = number + 1
        self.grow(four)
        self.together(four)

    def frozen(self, four: list[Machine]) -> None:
        still, others = four[1], [each for each in four if each is not four[1]]
        still.kill(signal.SIGSTOP)
        self.grow(others, 1)
        time.sleep(self.span.frozen)
        still.kill(signal.SIGCONT)
        self.grow(four)
        self.together(four)

    def partition(self, four: list[Machine]) -> None:
        sides = four[:2], four[2:]
        for side, other in (sides, sides[::-1]):
            for each in side:
                each.order("severed", json.dumps([machine.key for machine in other]))
        time.sleep(self.span.cut)
        with four[0].ledger() as one, four[3].ledger() as two:
            apart = not one.has_received(two.vector()) and not two.has_received(one.vector())
        for each in four:
            (each.home.path / "severed").unlink()
        self.grow(four)
        self.together(four)
        self.found["partitions_healed"] = int(apart)

    def late(self, four: list[Machine]) -> Machine:
        """Comes when the others have trained for a while, without any of the text."""
        joiner = self.machine("late")
        shutil.rmtree(joiner.folder / "blobs")
        joiner.start()
        self.grow([joiner], 1, 180)
        assert "took the anchor at" in joiner.said(), joiner.said()
        return joiner

    def clock(self, victim: Machine) -> None:
        """An hour ahead."""
        victim.leave()
        victim.start(clock=3600.0)
        self.grow([victim])

    def corrupted(self, four: list[Machine]) -> None:
        """A bit in the anchor in memory, one in a payload, one in the state on disk."""
        first, second, third = four[:3]
        for each in (first, second):
            each.order("hurry")
        self.grow(four, 1)
        first.order("flip")
        self.until(lambda: "is whole again" in first.said(), "the anchor's repair", 180)
        self.found["corruptions_found"] += 1
        with second.ledger() as ledger:
            parts = (update.fragments[0] for _, update in ledger.updates_since({}))
            path = next(
                ledger.blobs.path(part.digest)
                for part in parts
                if part.size and ledger.blobs.has(part.digest)
            )
        flip(path)
        self.until(lambda: "came again, whole" in second.said(), "the payload's repair", 240)
        self.found["corruptions_found"] += 1
        for each in (first, second):
            each.withdraw("hurry")
        third.leave()
        flip(
            max(
                (third.folder / "checkpoint").glob("?/*.safetensors"),
                key=lambda each: each.stat().st_mtime,
            )
        )
        third.start()
        self.until(lambda: "is damaged and not used" in third.said(), "the older state's use")
        self.found["corruptions_found"] += 1
        self.grow([third])
        self.together(four)

    def full(self, victim: Machine) -> None:
        """Its disk takes no file of more than some kilobytes for a while: it stops with a sentence, and comes back."""
        resource.prlimit(
            victim.process.pid, resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY)
        )
        victim.dead(120.0)
        assert "join again" in victim.said(), victim.said()[-500:]
        victim.start()
        self.grow([victim])

    def twice(self, victim: Machine) -> None:
        """A second worker on the same folder."""
        first = victim.process
        victim.start()
        victim.dead()
        assert victim.process.exitcode == 1 and "another" in victim.said()[-400:], victim.said()[
            -400:
        ]
        victim.process = first

    def backup(self, four: list[Machine]) -> None:
        """A folder restored from an old backup, that publishes before it hears of anybody: it forks itself."""
        victim, others = four[3], four[:3]
        victim.leave()
        copy = self.folder / "backup"
        shutil.copytree(victim.folder, copy)
        victim.start()
        self.grow([victim], 2)
        self.together(four)
        victim.leave()
        shutil.rmtree(victim.folder)
        copy.rename(victim.folder)
        victim.order(
            "severed", json.dumps([each.key for each in self.machines if each is not victim])
        )
        victim.start()
        self.grow([victim], 2)
        (victim.home.path / "severed").unlink()

        def proven() -> set[str]:
            return {author for machine in others for author in forked(machine)}

        self.until(proven, "the proof of the fork", 120)
        self.until(lambda: all(forked(m) for m in four), "the proof with everybody", 120)
        self.grow(four)
        self.found["forks_cut"] = len(proven())

    def hostile(self, victim: Machine) -> None:
        with victim.ledger() as ledger:
            sample = next(
                signed for signed, update in ledger.updates_since({}) if update.peer != victim.key
            )
            before = set(ledger.vector())
        attacker = Attacker(
            self.spec, messages.Peer(key=victim.key, addresses=[f"127.0.0.1:{victim.port}"]), sample
        )
        answers = asyncio.run(attacker.run())
        for name, reason in answers.items():
            print(f"    an update {name}: {reason or 'NOT REFUSED'}")
        with victim.ledger() as ledger:
            entered = {
                a for a in set(ledger.vector()) - before if a.startswith(attacker.identity.key)
            }
        assert not entered, "a hostile update went in"
        self.grow([victim])
        self.found["hostile_refused"] = sum(map(bool, answers.values()))
        self.found["hostile_sent"] = len(answers)

    def poison(self, four: list[Machine]) -> None:
        """One more volunteer publishes noise, and a verdict takes it out."""
        poisoner = self.machine("poisoner")
        poisoner.start()
        self.grow([poisoner], 1, 180)
        before, good = median(each.loss for each in four), poisoner.sent
        poisoner.order("poison")
        self.until(lambda: poisoner.sent >= good + 3, "its poison", 180)
        self.until(lambda: four[0].loss > before * 1.05, "the others' suffering", 120)
        poisoner.leave()
        with poisoner.ledger() as ledger:
            author = next(a for a in ledger.vector() if a.startswith(poisoner.key))
        with four[0].ledger() as ledger:
            verdict = build_verdict(
                ledger, RUN, {author: good}, {}, self.spec.verdict_horizon, "noise"
            )
        signed = MIRROR.sign("verdict", verdict)
        ruling = SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})
        write_atomically(
            four[0].folder / VERDICT_FOLDER / "ruling.json", ruling.model_dump_json().encode()
        )

        def out() -> bool:
            return all(
                "nothing after update" in each.said() and last(each, author) <= good
                for each in four
            )

        self.until(out, "the verdict with everybody", 120)
        self.rounds(four, 5)
        after = median(each.loss for each in four)
        self.found["loss_before_poison"], self.found["loss_five_rounds_later"] = before, after
        self.found["healed"] = after <= before * 1.01
        assert self.found["healed"], (
            f"the loss was {before:.4f} before the poison and is {after:.4f}"
        )

    def end(self, four: list[Machine]) -> None:
        """All leave at once, and come back to a run that is over: what each has then is compared, and added up anew."""
        for each in four:
            each.kill(signal.SIGINT)
        for each in four:
            each.dead(90.0)
        announced: dict[str, int] = {}
        for each in four:
            with each.ledger() as ledger:
                announced |= {a: n for a, n in ledger.vector().items() if a.startswith(each.key)}
        for each in four:
            each.start(finished=True)
        for each in four:
            each.dead(180.0)
            assert each.process.exitcode == 0, each.said()[-500:]
        lost = 0
        for each in four:
            with each.ledger() as ledger:
                lost += sum(max(0, n - ledger.head(a).seq) for a, n in announced.items())
        ends = {(each.status["vector"], each.status["anchor"]) for each in four}
        self.found |= {"lost_updates": lost, "agree": len(ends) == 1}
        self.found["poison_subtracted_exactly"] = all(
            added_up(each) == each.status["anchor"] for each in four
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the exchange survives.")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, default=MODEL.width)
    parser.add_argument(
        "--only", default="", help="the trials whose names hold one of these words: bits,full"
    )
    asked = parser.parse_args()
    span = Span(kills=6, steady=15.0, frozen=10.0, cut=15.0) if asked.quick else Span()
    FORK.set_forkserver_preload(["drill_worker"])
    with tempfile.TemporaryDirectory(prefix="barnraise-drill-") as folder:
        drill = Drill(Path(folder), span, replace(MODEL, width=asked.width), asked.seed)
        four = [drill.machine(name) for name in ("north", "east", "south", "west")]
        for each in four:
            each.start()
        north, _, south, west = four
        trials: list[tuple[str, Callable[[], object]]] = [
            ("nothing happens", lambda: drill.steady(four)),
            (f"{span.kills} kills", lambda: drill.kills(four)),
            ("one is frozen", lambda: drill.frozen(four)),
            ("the network falls apart, and heals", lambda: drill.partition(four)),
            ("a late joiner", lambda: drill.late(four).leave()),
            ("a clock an hour off", lambda: drill.clock(south)),
            ("bits flip in memory and on disk", lambda: drill.corrupted(four)),
            ("a disk is full", lambda: drill.full(west)),
            ("two workers on one folder", lambda: drill.twice(north)),
            ("a hostile peer", lambda: drill.hostile(north)),
            ("an old backup", lambda: drill.backup(four)),
            ("poison, and a verdict", lambda: drill.poison(four)),
            ("the end", lambda: drill.end(four)),
        ]
        words = [word for word in asked.only.split(",") if word]
        try:
            for name, trial in trials:
                if words and not any(word in name for word in words):
                    continue
                began, known = time.monotonic(), dict(drill.found)
                print(f"  {name} …", flush=True)
                trial()
                print(f"  {name}: survived, {time.monotonic() - began:.0f} s", flush=True)
                for what in [
                    what for what, figure in drill.found.items() if known.get(what) != figure
                ]:
                    print(f"    {what}: {drill.found[what]}", flush=True)
        finally:
            for each in drill.machines:
                if each.process is not None and each.process.is_alive():
                    each.process.kill()
    wanted = ("agree", "kills", "lost_updates", "partitions_healed", "corruptions_found", "hostile_refused",
              "poison_subtracted_exactly", "exchange_cpu_share", "uplink_share")  # fmt: skip
    print(json.dumps({name: drill.found.get(name) for name in wanted} | drill.found))


if __name__ == "__main__":
    main()
