"""Workers exchange updates with each other; no coordinator answers."""

from contextlib import closing

import pytest

from barnraise.errors import StateError
from barnraise.ledger.blob_store import BlobStore
from barnraise.ledger.ledger import Ledger
from barnraise.planning import fragment_streaming as streaming
from barnraise.swap.engine import WARMUP_STEPS
from barnraise.training import pauses
from barnraise.training.checkpoint import CheckpointSlots
from barnraise.training.local_control import LocalControl, LocalPause

TRIO = ["ada", "ben", "cleo"]


def other_names(name: str) -> list[str]:
    return [n for n in TRIO if n != name]


@pytest.mark.slow  # the next tests compare anchors too, of workers that were killed
def test_three_workers_end_with_bit_identical_anchors(swarm):
    run = swarm(token_budget=120_000)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.join_in_agreement(*trio)
    first, last = min(v.status["validation_first"] for v in trio), trio[0].status["validation_last"]
    assert first[0] == 0 and last[0] >= 120_000
    assert last[1] < first[1] - 1.0, "the loss must fall"
    assert all(v.status["updates_sent"] > 0 and v.status["updates_received"] > 0 for v in trio)
    assert len({v.status["validation_last"][1] for v in trio}) == 1, "one anchor, one loss"


def test_pause_offline_leaves_the_peers_and_returns_to_them(swarm, monkeypatch):
    monkeypatch.setattr(pauses, "MOMENT_SECONDS", 0.0)
    run = swarm(token_budget=10_000_000)
    pair = [run.start(name, knows=other_names(name)) for name in TRIO[:2]]
    run.until(lambda: all(v.status.get("updates_received", 0) > 0 for v in pair))
    worker, control = pair[0].worker, LocalControl(pair[0].worker.joined.folder.path)
    control.pause(LocalPause(is_offline=True))
    run.until(lambda: worker.is_freed and pair[0].status["peers"] == pair[1].status["peers"] == 0)
    sent, other_sent = worker.exchange.stats.bytes_sent, pair[1].status["updates_sent"]
    run.until(lambda: pair[1].status["updates_sent"] > other_sent + 2)  # it trains on alone
    assert worker.exchange.stats.bytes_sent == sent
    assert pair[0].status["reason"] == "paused on this machine"
    received = pair[0].status["updates_received"]
    control.resume()
    run.until(lambda: pair[0].status["updates_received"] > received + 2)
    assert pair[0].status["activity"] == "training"
    for volunteer in pair:
        volunteer.leave()


@pytest.fixture
def short_fragment_intervals(monkeypatch):
    """Let rounds of a second or less stream their fragments as well."""
    monkeypatch.setattr(streaming, "MIN_PART_SECONDS", 0.02)


@pytest.mark.slow  # the next test streams fragments too, and kills a worker
@pytest.mark.usefixtures("short_fragment_intervals")
def test_workers_that_stream_fragments_end_bit_identical(swarm):
    run = swarm(strategy="streams", round_steps=16)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.join_in_agreement(*trio)
    assert trio[0].status["validation_last"][1] < trio[0].status["validation_first"][1] - 1.0, (
        "the loss must fall"
    )
    with closing(Ledger(trio[0].worker.joined.folder.path)) as ledger:
        updates = [update for _, update in ledger.updates_since({})]
    assert any(len(update.payload_parts) < len(update.fragments) for update in updates), (
        "some updates contain only a part of the fragments"
    )
    for author in {update.author for update in updates}:
        parts = [len(update.payload_parts) for update in updates if update.author == author]
        assert parts[-1] == len(updates[0].fragments), "the last update contains all fragments"


@pytest.mark.usefixtures("short_fragment_intervals")
def test_worker_killed_between_two_fragments_returns_bit_identical(swarm):
    run = swarm(strategy="streams", round_steps=16)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.until(lambda: all(v.status.get("ledger_tokens", 0) > 30_000 for v in trio))
    trio[1].kill()
    back = run.start("ben", knows=other_names("ben"))
    run.join_in_agreement(trio[0], back, trio[2])


def test_killed_worker_returns_to_its_own_state(swarm):
    run = swarm()
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.until(lambda: all(v.status.get("ledger_tokens", 0) > 30_000 for v in trio))
    victim = trio[1]
    victim.kill()
    before = victim.status["updates_sent"]
    assert before > 0
    back = run.start("ben", knows=other_names("ben"))
    run.join_in_agreement(trio[0], back, trio[2])
    assert back.status["updates_sent"] >= before, "it knows the updates that it had published"


def test_late_joiner_fetches_anchor_and_text_from_peers(swarm):
    run = swarm(token_budget=120_000)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.until(lambda: all(v.status.get("ledger_tokens", 0) > 20_000 for v in trio))
    run.trust_peers()
    late = run.start("dora", with_text=False, knows=["ada", "ben"])
    run.join_in_agreement(*trio, late)
    assert late.status["updates_sent"] > 0
    assert late.status["validation_first"][0] > 0, (
        "it started from the others' anchor, not from the seed's weights"
    )
    ours = BlobStore(late.worker.joined.folder.path / "blobs")
    assert all(ours.has(shard.digest) for shard in run.manifest.train)


def test_partitioned_swarm_trains_on_and_agrees_once_healed(swarm):
    run = swarm(token_budget=160_000)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    run.until(lambda: all(v.status.get("updates_received", 0) > 2 for v in trio))
    lonely = trio[2]
    run.network.partition({trio[0].worker.key, trio[1].worker.key}, {lonely.worker.key})
    run.until(lambda: [v.status["peers"] for v in trio] == [1, 1, 0])
    before = [v.status["updates_sent"] for v in trio]
    run.until(
        lambda: all(v.status["updates_sent"] > n + 1 for v, n in zip(trio, before, strict=True))
    )
    assert [v.status["peers"] for v in trio] == [1, 1, 0]
    run.network.heal()
    run.join_in_agreement(*trio)


def test_leaving_worker_has_published_and_saved_its_last_round(swarm):
    run = swarm(token_budget=10_000_000)
    ada, ben = run.start("ada", knows=["ben"]), run.start("ben", knows=["ada"])
    run.until(
        lambda: (
            ada.status.get("updates_received", 0) > 0 and ben.status.get("updates_received", 0) > 0
        )
    )
    ben.leave()
    assert ben.status["activity"] == "left"
    run.until(lambda: ada.status["updates_received"] >= ben.status["updates_sent"])
    ada.leave()
    saved = CheckpointSlots(ben.worker.joined.folder.path / "checkpoint").load()
    assert saved is not None and saved[1].last_seq == ben.status["updates_sent"]


def test_state_folder_belongs_to_one_worker_and_one_run(swarm):
    run = swarm(token_budget=10_000_000)
    ada = run.start("ada")
    with pytest.raises(StateError, match="in use by another worker"):
        run.start("ada")
    ada.leave()
    home = run.home("ada")
    other = "0192f0c1-2d3e-7f40-8a5b-6c7d8e9f0a1c"
    folder = home.path / "runs" / other
    (home.path / "runs" / ada.worker.joined.run).rename(folder)
    with pytest.raises(StateError, match="holds the state of run"):
        home.open_run(other)
    label = folder / "folder.json"
    label.write_text(label.read_text().replace('"format": 1', '"format": 99'))
    with pytest.raises(StateError, match="is of format 99"):
        home.open_run(other)


def test_ticket_holder_rejoins_through_a_known_peer_without_a_site(swarm):
    run = swarm(token_budget=10_000_000)
    trio = [run.start(name, knows=other_names(name)) for name in TRIO]
    ada, ben, cleo = trio
    run.until(
        lambda: all(
            v.status.get("peers", 0) == 2 and v.status.get("updates_sent", 0) > 1 for v in trio
        )
    )
    ben.kill()
    ada.leave()
    back = run.start("ben")  # no coordinator names peers to it
    run.until(lambda: back.status.get("peers", 0) == 1)
    before = back.status["updates_received"]
    run.until(lambda: back.status["updates_received"] > before + 1)
    for volunteer in (back, cleo):
        volunteer.leave()


def test_joiner_warms_up_its_optimizer(swarm):
    run = swarm(token_budget=10_000_000)
    run.set_person("ada")  # nobody else would take so young an anchor from one machine
    ada = run.start("ada")
    run.until(lambda: ada.status.get("updates_sent", 0) > 1)
    late = run.start("late", knows=["ada"])
    run.until(
        lambda: hasattr(late.worker, "engine") and late.worker.engine.progress.optimizer_steps > 0
    )
    progress = late.worker.engine.progress
    assert progress.optimizer_steps + progress.warmup_steps_left >= WARMUP_STEPS
    assert progress.warmup_steps_left < WARMUP_STEPS
    assert ada.worker.engine.progress.warmup_steps_left == 0
    for volunteer in (late, ada):
        volunteer.leave()
