"""Retract poisoned updates, survive a fork, and repair damaged anchors, with real workers."""

import shutil
import time

import pytest
import torch
from helpers.worker.fake_coordinator import FakeCoordinator
from memory_anchor import MemoryAnchor

from barnraise.cli.verdict import build_verdict
from barnraise.coordinator_client import reporter as reporter_module
from barnraise.durable_io import write_atomically
from barnraise.errors import DamageError
from barnraise.exchange.verdicts import verdict_sync as verdict_sync_module
from barnraise.exchange.verdicts.verdict_handler import VERDICT_FOLDER
from barnraise.ledger import anchor_scrub as anchor_scrub_module
from barnraise.ledger.anchor import fragment_to_bytes
from barnraise.ledger.codec import decode
from barnraise.ledger.ledger import Ledger
from barnraise.ledger.scrub_pace import ScrubPace
from barnraise.planning.limits import Limits
from barnraise.protocol.coordinator_messages import ReportReply
from barnraise.protocol.signing import Identity, digest
from barnraise.protocol.verdicts import SignedVerdict, Verdict
from barnraise.spec import ModelSpec
from barnraise.training import prefetch

OWNER = MIRROR = Identity(b"m" * 32)  # the key that signs the swarm's tickets
PHANTOM = Identity(b"p" * 32)
DEEP = ModelSpec(layers=6, width=64, heads=2, context=32, vocabulary=256)
TIGHT = Limits(memory=6_500_000)


@pytest.fixture(autouse=True)
def short_intervals(monkeypatch):
    monkeypatch.setattr(anchor_scrub_module, "FRAGMENT_PACE", ScrubPace(0.02, 0.2))
    monkeypatch.setattr(verdict_sync_module, "HEADS_SECONDS", 0.2)
    monkeypatch.setattr(verdict_sync_module, "VERDICT_RESEND_SECONDS", 1.0)


def start_first_worker(run, **options):
    """Start a run's first worker, which has every update; later ones begin at a snapshot."""
    volunteer = run.start("ada", **options)
    run.until(lambda: volunteer.status.get("updates_sent", 0) > 0)
    return volunteer


def publish_noise(engine) -> None:
    """Let the engine publish loud noise from now on."""
    honest = engine.end_round

    def end_round(encode, *rest):
        def noise(values):
            return encode(torch.randint(-(1 << 26), 1 << 26, values.shape, dtype=torch.int32))

        return honest(noise, *rest)

    engine.end_round = end_round


def store_verdict(volunteer, verdict: Verdict) -> None:
    """Store a verdict as `barnraise verdict` does for a running worker."""
    signed = OWNER.sign("verdict", verdict)
    ruling = SignedVerdict(body=signed.body, signatures={signed.key: signed.signature})
    path = volunteer.worker.joined.folder.path / VERDICT_FOLDER / f"{digest(signed.body)}.json"
    write_atomically(path, ruling.model_dump_json().encode())


def first_forked_seq(one: Ledger, other: Ledger, author: str) -> int | None:
    """Return the first number under which two ledgers have different updates of an author."""
    headers = [ledger.headers(author, 1, 1 << 40) for ledger in (one, other)]
    for (_, first), (_, second) in zip(*headers, strict=False):
        if first != second:
            return first.seq
    return None


def digest_of_the_sum(run, ledger) -> str:
    """Return the digest of the weights that a ledger's files add up to."""
    return sum_of_updates(run, ledger).digest()


def sum_of_updates(run, ledger) -> MemoryAnchor:
    """Add the initial weights and every update in a ledger's files that no verdict retracts."""
    anchor = MemoryAnchor.from_seed(run.spec.model, run.spec.seed)
    for author, last in ledger.vector().items():
        for _, update in ledger.headers(author, 1, last):
            for index, part in enumerate(update.fragments):
                size = anchor.fragments[index].numel()
                if part.size:  # a round that is published in parts has empty ones
                    anchor.add_units(index, decode(ledger.blobs.read(part.digest), size))
    return anchor


def leave_with_all_updates(run, volunteer) -> None:
    """Let a volunteer leave once its anchor has every update that its peers have."""
    worker = volunteer.worker
    run.until(lambda: worker.exchange.stats.updates_behind == 0)
    run.until(lambda: worker.anchor.vector == worker.ledger.vector())
    volunteer.leave()


def test_poisoned_updates_are_retracted_everywhere_without_a_trace(swarm):
    run = swarm(token_budget=10_000_000)
    ada = start_first_worker(run)
    ben, cleo = (run.start(name, knows=["ada", "ben"]) for name in ("ben", "cleo"))
    run.until(lambda: all(v.status.get("updates_sent", 0) > 1 for v in (ada, ben, cleo)))
    author, good = cleo.worker.exchange.author.name, cleo.worker.exchange.author.last_seq
    publish_noise(cleo.worker.engine)
    before = ada.status["validation_last"][1]
    run.until(lambda: ada.worker.ledger.head(author).seq > good + 2)
    run.until(lambda: ada.status["validation_last"][1] > before + 0.2)
    spoilt = ada.status["validation_last"][1]
    cleo.leave()
    run.until(lambda: ada.worker.exchange.stats.updates_behind == 0)
    store_verdict(
        ada, build_verdict(ada.worker.ledger, run.manifest.run, {author: good}, {}, 20, "noise")
    )
    run.until(lambda: all(v.worker.anchor.vector.get(author) == good for v in (ada, ben)))
    run.until(lambda: ada.status["validation_last"][1] < spoilt - 0.1)
    # A late joiner starts without the retracted updates.
    dora = run.start("dora", knows=["ada", "ben"])
    run.until(lambda: dora.status.get("updates_sent", 0) > 0)
    for volunteer in (dora, ben):
        volunteer.leave()
    leave_with_all_updates(run, ada)
    ledger = Ledger(ada.worker.joined.folder.path)
    assert ledger.vector()[author] == good
    assert ada.status["anchor"] == digest_of_the_sum(run, ledger)
    ledger.close()


def begin_at_sybils_snapshot(run, ledger: Ledger) -> str:
    """Let a ledger begin at shifted weights of an author who never published; return the author."""
    fragments = sum_of_updates(run, ledger).fragments
    digests = [ledger.blobs.store(fragment_to_bytes(units)) for units in fragments]
    ledger.retain_base(ledger.vector(), digests, {})
    shifted = [ledger.blobs.store(fragment_to_bytes(units + (1 << 20))) for units in fragments]
    honest = next(iter(ledger.last_updates().values()))
    fields = {"peer": PHANTOM.key, "seq": 5000, "volunteer": "9" * 64, "tokens": 1, "total": 1}
    header = honest.model_copy(update=fields)
    ledger.rebase([(PHANTOM.sign("update", header), header)], shifted)
    return header.author


@pytest.mark.slow  # worker/exchange/snapshots tests the same with machines that do not train
def test_verdict_on_a_sybils_snapshot_returns_a_worker_to_its_weights(swarm):
    run = swarm(token_budget=10_000_000)
    ada = start_first_worker(run)
    ben = run.start("ben", knows=["ada"])
    run.until(lambda: ben.status.get("updates_sent", 0) > 0)
    ben.leave()
    ledger = Ledger(ben.worker.joined.folder.path)
    phantom = begin_at_sybils_snapshot(run, ledger)
    ledger.close()
    ben = run.start("ben", knows=["ada"])
    run.until(lambda: phantom in getattr(ben.worker, "anchor", ada.worker.anchor).vector)
    sent = ben.worker.exchange.author.last_seq
    run.until(lambda: ben.worker.exchange.author.last_seq > sent)
    fields = {"run": run.manifest.run, "after": {}, "volunteers": {"9" * 64: {}}}
    store_verdict(ben, Verdict(**fields, reason="nobody", issued=1.0))
    run.until(lambda: phantom not in ben.worker.ledger.vector())
    sent = ben.worker.exchange.author.last_seq
    run.until(lambda: ben.worker.exchange.author.last_seq > sent + 2)
    ada.leave()
    run.until(
        lambda: (
            ben.worker.exchange.stats.updates_behind == 0
            and ben.worker.anchor.vector == ben.worker.ledger.vector()
        )
    )
    ben.leave()
    ledger = Ledger(ben.worker.joined.folder.path)
    assert phantom not in ledger.vector() and ledger.head(ada.worker.exchange.author.name).seq > 1
    assert ben.status["anchor"] == digest_of_the_sum(run, ledger)
    ledger.close()


def test_verdict_in_a_report_reply_is_applied_by_all_workers(swarm, caplog):
    """One of two machines reaches the site; three invalid verdicts precede the valid one."""
    run = swarm(token_budget=10_000_000)
    site = FakeCoordinator(MIRROR, run.manifest.run)
    try:
        ada, ben = start_first_worker(run, site=site.url), run.start("ben", knows=["ada"])
        run.until(lambda: all(v.status.get("updates_received", 0) > 3 for v in (ada, ben)))
        author = ben.worker.exchange.author.name

        def sign_verdict(by=MIRROR, run_id=run.manifest.run, suffix="") -> SignedVerdict:
            verdict = Verdict(run=run_id, after={author: 1}, reason="noise", issued=1.0)
            signed = by.sign("verdict", verdict)
            return SignedVerdict(
                body=signed.body + suffix, signatures={signed.key: signed.signature}
            )

        stranger = Identity(b"x" * 32)
        invalid = {
            "neither the run's owner nor one of its mirrors": sign_verdict(by=stranger),
            "is for run": sign_verdict(run_id="01890000-0000-7000-8000-000000000001"),
            "more than 50000 bytes": sign_verdict(suffix=" " + "é" * 26_000),
        }
        for reason, verdict in invalid.items():
            site.verdicts.append(verdict)
            run.until(lambda reason=reason: reason in caplog.text)
        assert not ada.worker.ledger.verdicts.rulings
        site.verdicts.append(sign_verdict())
        run.until(lambda: site.verdicts_after == len(site.verdicts))
        run.until(lambda: all(v.worker.anchor.vector.get(author) == 1 for v in (ada, ben)))
        ben.leave()
        leave_with_all_updates(run, ada)
    finally:
        site.close()
    ledger = Ledger(ada.worker.joined.folder.path)
    assert ledger.vector()[author] == 1 and ada.status["anchor"] == digest_of_the_sum(run, ledger)
    ledger.close()


def test_revoked_machine_is_refused_within_a_minute_of_rare_reports(swarm, caplog, monkeypatch):
    """Reports are due hourly. One of two peers reaches the site and relays the directive."""
    assert reporter_module.DIRECTIVE_SECONDS <= 30
    monkeypatch.setattr(reporter_module, "DIRECTIVE_SECONDS", 1.0)
    run = swarm(token_budget=10_000_000)
    site = FakeCoordinator(MIRROR, run.manifest.run)
    site.directive["report_every"] = 3600.0
    route = f"GET /runs/{run.manifest.run}/directive"
    try:
        ada = run.start("ada", knows=["ben", "cleo"], site=site.url)
        ben, cleo = (run.start(name, knows=["ada", "ben", "cleo"]) for name in ("ben", "cleo"))
        site.directive["machine"] = ada.worker.joined.machine
        site.routes[route] = lambda body: ReportReply(
            acknowledged=0, directive=site.signed_directive()
        )

        def linked(one, other) -> bool:
            return other.worker.key in {peer.key for peer in one.worker.exchange.stats.neighbours}

        run.until(lambda: linked(ada, cleo) and linked(ben, cleo) and route in site.requests)
        site.directive["revoked"] = [cleo.worker.key]
        started_at = time.monotonic()
        run.until(lambda: not linked(ada, cleo) and not linked(ben, cleo), 30.0)
        assert time.monotonic() - started_at < 30.0, (
            "one peer polls the directive, and relays it to the other"
        )
        # Cleo presents her ticket again.
        run.until(lambda: f"peer {cleo.worker.key[:8]} was revoked" in caplog.text)
    finally:
        site.close()


def test_machine_that_the_site_refuses_while_it_joins_leaves(swarm):
    """It waits for weights from peers, and those who refuse it, too, send none."""
    run = swarm()
    site = FakeCoordinator(MIRROR, run.manifest.run)
    site.failing = 403, "the machine mill was revoked here"
    try:
        mill = run.start("mill", knows=["ada"], site=site.url)  # ada does not answer
        mill.join(prefetch.SNAPSHOT_SECONDS / 2)
    finally:
        site.close()
    assert mill.status["step"] == 0 and mill.status["refused"] == site.failing[1]


@pytest.mark.slow  # test_failures.py restores a machine that has lost its ledger
def test_worker_restored_from_an_old_backup_forks_and_continues(swarm):
    run = swarm(token_budget=10_000_000)
    ada, ben = start_first_worker(run), run.start("ben", knows=["ada"])
    run.until(
        lambda: ben.status.get("updates_sent", 0) > 1 and ada.status.get("updates_received", 0) > 1
    )
    ben.leave()
    folder, copy = ben.worker.joined.folder.path, run.folder / "copy"
    shutil.copytree(folder, copy)
    ben = run.start("ben", knows=["ada"])
    sent = run.volunteers[1].status["updates_sent"]
    old = ben.worker.exchange.author.name
    run.until(lambda: ada.worker.ledger.head(old).seq > sent + 1)
    ben.leave()
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    run.network.partition({ada.worker.key}, {ben.worker.key})
    ben = run.start("ben", knows=["ada"])
    run.until(lambda: ben.worker.exchange.author.last_seq > sent + 1)
    # It may not be the first one after the copy: updates computed before any arrival are identical.
    run.until(lambda: first_forked_seq(ada.worker.ledger, ben.worker.ledger, old) is not None)
    good = first_forked_seq(ada.worker.ledger, ben.worker.ledger, old) - 1
    run.network.heal()
    run.until(lambda: all(v.worker.ledger.verdicts.limits == {old: good} for v in (ada, ben)))
    run.until(
        lambda: ben.worker.exchange.author.name != old and ben.worker.exchange.author.last_seq > 0
    )
    run.until(lambda: ada.worker.anchor.vector.get(ben.worker.exchange.author.name, 0) > 0)
    ben.leave()
    leave_with_all_updates(run, ada)
    ledger = Ledger(ada.worker.joined.folder.path)
    assert ada.status["anchor"] == digest_of_the_sum(run, ledger), (
        "neither update of the fork is left"
    )
    ledger.close()


@pytest.mark.slow  # the tests of AnchorScrub cover the same without training
def test_bit_flip_in_memory_is_found_repaired_and_reported(swarm):
    run = swarm(token_budget=400_000)
    ada, ben = run.start("ada", knows=["ben"]), run.start("ben", knows=["ada"])
    run.until(lambda: all(v.status.get("updates_received", 0) > 1 for v in (ada, ben)))
    ada.worker.anchor.fragments[1][11] ^= 1 << 27
    run.until(lambda: ada.status["checksum"]["repaired"] == 1)
    assert ada.status["checksum"]["corruptions"] == 1 and ada.status["checksum"]["damaged"] is None
    run.join_in_agreement(ada, ben, seconds=120)


def test_bit_flip_in_the_anchor_file_is_found_and_recovered_on_join(swarm):
    run = swarm(DEEP, token_budget=10_000_000, round_steps=3)
    ada = run.start("ada")
    tight = run.start("ben", knows=["ada"], limits=TIGHT)
    run.until(lambda: tight.status.get("updates_sent", 0) > 1)
    tight.leave()
    store = tight.worker.store
    with (tight.worker.joined.folder.path / "state" / "state.bin").open("r+b") as file:
        file.seek(store.newest_offset("anchor", 1, 0) + 100)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 4]))
    hurt = run.start("ben", knows=["ada"], limits=TIGHT)
    hurt.thread.join(60)
    assert isinstance(hurt.failure.pop(), DamageError)
    run.volunteers.remove(hurt)
    back = run.start("ben", knows=["ada"], limits=TIGHT)
    run.until(lambda: back.status.get("updates_sent", 0) > tight.status["updates_sent"])
    run.until(lambda: back.status["checksum"]["checked"] > len(back.worker.anchor.fragments))
    assert back.status["checksum"]["corruptions"] == 0
    for volunteer in (back, ada):
        volunteer.leave()
