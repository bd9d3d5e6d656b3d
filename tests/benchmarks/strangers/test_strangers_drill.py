"""Test the pure parts of the strangers' drill: delays, loss curves and the strangers' chains."""

import json
import time
from types import SimpleNamespace

import pytest
from helpers.drill_modules import import_drill_module

from barnraise.ledger.ledger import Ledger, Outcome
from barnraise.ledger.validation import UpdateRules, validate_header
from barnraise.peering.transports.framing import unpack
from barnraise.protocol.messages import UpdatePush
from barnraise.spec import ModelSpec, RunSpec, TextSpec

arrival_log = import_drill_module("arrival_log")
loss_curve = import_drill_module("loss_curve")
Arrival = arrival_log.Arrival


def test_delays_count_from_the_authors_ledger_to_each_other_ledger():
    own = [Arrival(10.0, "a.1", 1), Arrival(12.0, "a.1", 2)]
    other = [Arrival(10.5, "a.1", 1), Arrival(11.0, "b.1", 1)]
    logs = {"a": [*own, Arrival(11.25, "b.1", 1)], "b": other, "c": [Arrival(13.0, "a.1", 1)]}
    delays = arrival_log.measure_delays(logs, 10.0, 12.0)
    assert sorted(delays) == [0.25, 0.5, 3.0]


def test_updates_that_never_arrived_are_counted():
    logs = {"a": [Arrival(10.0, "a.1", 1)], "b": [Arrival(10.5, "a.1", 1)], "c": []}
    assert arrival_log.count_missing(logs, 0.0, 20.0) == 1
    assert arrival_log.count_missing(logs, 11.0, 20.0) == 0


def test_log_of_arrivals_leaves_out_an_incomplete_line(tmp_path):
    path = tmp_path / "arrivals"
    assert arrival_log.read_arrivals(path) == []
    path.write_text('[1.5, "a.1", 1]\n[2.5, "a.')
    assert arrival_log.read_arrivals(path) == [Arrival(1.5, "a.1", 1)]


def test_arrival_log_records_what_a_ledger_appends_with_or_without_tickets(tmp_path, monkeypatch):
    added = [Outcome.ADDED, Outcome.GAP]
    monkeypatch.setattr(Ledger, "append_all", lambda self, updates, tickets=(): added)
    path = tmp_path / "arrivals.jsonl"
    arrival_log.ArrivalLog(path).wrap_ledger()
    first, second = (SimpleNamespace(author="a.1", seq=seq) for seq in (1, 2))
    ledger = Ledger(tmp_path / "ledger")
    try:
        assert ledger.append_all([(None, first), (None, second)], ["a ticket"]) == added
        assert ledger.append_all([(None, first), (None, second)]) == added
    finally:
        ledger.close()
    assert [(arrival.author, arrival.seq) for arrival in arrival_log.read_arrivals(path)] == [
        ("a.1", 1),
        ("a.1", 1),
    ]


def test_loss_curve_counts_the_tokens_of_honest_machines_only(tmp_path):
    path = tmp_path / "evaluations"
    lines = [[3.0, {"a.1": 100, "x.1": 900}], [2.0, {"a.1": 150, "a.2": 50, "x.1": 5000}]]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    curve = loss_curve.read_curve(path, {"a"})
    assert curve == [(100, 3.0), (200, 2.0)]
    assert loss_curve.loss_at(curve, 150) == 2.5
    assert loss_curve.loss_at(curve, 50) == 3.0
    assert loss_curve.loss_at(curve, 900) == 2.0


def test_gap_of_two_runs_is_relative_and_signed():
    reference = [[(0, 4.0), (100, 2.0)]]
    worse = [[(0, 4.4), (100, 2.2)]]
    assert loss_curve.relative_gap(reference, reference) == 0.0
    assert loss_curve.relative_gap(reference, worse) == pytest.approx(0.1)
    assert loss_curve.relative_gap(worse, reference) == pytest.approx(-1 / 11)


def test_chain_of_a_stranger_is_valid_by_every_rule(tmp_path):
    """An attack that is refused for a mistake of the drill would prove nothing."""
    stranger = import_drill_module("stranger")
    attacks = import_drill_module("stranger_attacks")
    joined_run = import_drill_module("joined_run")
    model = ModelSpec(layers=1, width=16, heads=1, context=8, vocabulary=256)
    spec = RunSpec(model, TextSpec(tokenizer="bytes"), roots=(joined_run.MIRROR.key,))
    setup = stranger.AttackSetup("empty updates", "eve", spec.to_json(), (), 1000, tmp_path / "r")
    liar = attacks.TokenLiar(setup, stranger.AttackRecord(setup.record))
    rules = UpdateRules.from_spec(spec, joined_run.RUN, frozenset(spec.roots))
    time.sleep(0.01)
    for tokens in (0, 5):
        time.sleep(0.01)
        push, _ = unpack(liar.author.append(tokens, liar.parts, liar.payloads)[0])
        assert isinstance(push, UpdatePush)
        update = validate_header(push.header, push.ticket, rules)
        assert update.tokens == tokens
