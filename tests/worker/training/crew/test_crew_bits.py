"""A crew has the bits of one machine: steps, rounds, arrivals, a validation, a line that breaks."""

import itertools
import shutil
from dataclasses import replace

import pytest
import torch
from helpers.effort import one_in
from helpers.worker.crews import LocalCrew, deal
from helpers.worker.llama_models import QWEN, UNTIED
from helpers.worker.plans import bitwise

from barnraise.errors import CrewError, RoundLostError, StateError
from barnraise.ledger.anchor import Anchor, compute_sketch
from barnraise.ledger.codec import encode
from barnraise.planning.quantization_scheme import QuantizationScheme
from barnraise.spec import OPTIMIZERS
from barnraise.swap.engine import UPDATES_PER_STEP, WARMUP_STEPS
from barnraise.swap.state_store import FragmentSequence
from barnraise.training.crew.crew_frames import PieceKind
from barnraise.training.crew.crew_member import ForwardedUpdate
from barnraise.training.training_engine import Encoder

MODEL = bitwise.MODEL
ENCODE = Encoder(QuantizationScheme.parse("dense2"))
MICRO_BATCHES = 4


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def whole_plan(model=MODEL, **changes):
    """Return the plan of one machine, whose stages the crew's machines get."""
    return bitwise.resident_plan(model, MICRO_BATCHES, **changes)


def one_group(plan):
    """Return the plan with all blocks of a stage in one group."""
    blocks = tuple(plan.blocks)
    return replace(plan, forward_groups=(blocks,), backward_groups=(blocks,))


def initial(model=MODEL):
    return [bitwise.initial_units(fragment) for fragment in model.fragments()]


def other_update(seed):
    """Return an update of another author."""
    generator = torch.Generator().manual_seed(seed)
    payloads = [
        encode(torch.randint(-(1 << 14), 1 << 14, (f.size,), generator=generator).int())[0]
        for f in MODEL.fragments()
    ]
    sizes = [fragment.size for fragment in MODEL.fragments()]
    return ForwardedUpdate({i: (payload, 1) for i, payload in enumerate(payloads)}, sizes)


def train_steps(engine, steps, first=0, model=MODEL):
    """Train on the texts of step `first` and after; return losses and norms."""
    found = []
    for step in range(first, first + steps):
        text = bitwise.sample_text(model, bitwise.SEQUENCES, seed=step)
        batches = list(text.split(bitwise.SEQUENCES // MICRO_BATCHES))
        stats = engine.step(batches, position=step + 1)
        found += [stats.loss, stats.norm, stats.tokens]
    return found


def train_two_rounds(engine, steps=2):
    """Train two rounds with arrivals; return losses, published bytes and a validation."""
    found = []
    for number in range(2):
        found += train_steps(engine, steps, first=number * steps)
        prediction = tuple(0.25 * number for _ in range(MODEL.layers + 2))
        engine.queue_updates(other_update(number), prediction=prediction)
        found += train_steps(engine, 1, first=100 + number)
        found += [(part.fragment, part.payload) for part in engine.end_round(ENCODE, 0.5)]
    held_out = [bitwise.sample_text(MODEL, 3, seed=77)]
    found.append(engine.evaluate(held_out))
    return found


def reference(plan, train):
    """Return what one machine finds, and its state."""
    engine = bitwise.open_engine(plan)
    found = train(engine)
    state = bitwise.read_state(engine)
    exchanged = [t.clone() for t in FragmentSequence(engine.store, "anchor")]
    engine.close()
    return found, state, exchanged


def same_bits(one, other):
    return all(
        torch.equal(a.view(torch.int32), b.view(torch.int32))
        for a, b in zip(one, other, strict=True)
    )


# Every other one has each deal and each network.
DEALS = list(itertools.product(["memory", "iroh"], [(4, 4), (2, 3, 3), (1, 2, 2, 3)]))


@pytest.mark.parametrize(("kind", "counts"), one_in(2, DEALS), ids=str)
def test_crew_has_the_bits_of_one_machine(counts, kind, tmp_path):
    plan = whole_plan()
    expected, state, anchor = reference(plan, train_two_rounds)
    with LocalCrew([one_group(plan)] * len(counts), deal(plan, counts), tmp_path, kind) as crew:
        engine = crew.start(initial())
        assert train_two_rounds(engine) == expected
        assert same_bits(crew.read_state(), state)
        assert same_bits(list(crew.anchor.fragments), anchor)
        assert not crew.failures


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("model", [UNTIED, QWEN], ids=["untied", "qwen"])
def test_llama_crew_has_the_bits_of_one_machine(model, optimizer, tmp_path):
    plan = whole_plan(model, optimizer=optimizer)
    expected, state, _ = reference(plan, lambda engine: train_steps(engine, 3, model=model))
    counts = (1, model.layers - 1)
    with LocalCrew([one_group(plan)] * 2, deal(plan, counts), tmp_path) as crew:
        assert train_steps(crew.start(initial(model)), 3, model=model) == expected
        assert same_bits(crew.read_state(), state)
        assert not crew.failures


def test_many_arrivals_at_once_have_the_bits_of_one_machine(tmp_path):
    plan = whole_plan()

    def train(engine):
        found = train_steps(engine, 1)
        list(engine.end_round(ENCODE, 0.5))
        prediction = tuple(0.5 for _ in range(MODEL.layers + 2))
        engine.queue_updates(*map(other_update, range(2 * UPDATES_PER_STEP + 1)))
        engine.queue_updates(other_update(100), prediction=prediction)
        return found + train_steps(engine, 1, first=1)

    expected, state, _ = reference(plan, train)
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4)), tmp_path) as crew:
        assert train(crew.start(initial())) == expected
        assert same_bits(crew.read_state(), state)
        assert not crew.failures


def test_members_that_swap_have_the_bits_of_one_machine(tmp_path):
    """The lead stages its blocks, one member trains from disk, and one retains activations."""
    plan = whole_plan()
    swapped = bitwise.Case(MICRO_BATCHES, "memory", "exact", 127, 127).plan()
    from_disk = bitwise.Case(MICRO_BATCHES, "disk exact", "exact", 127, 127).plan()
    retaining = replace(one_group(plan), retained_blocks=1)
    expected, state, _ = reference(plan, lambda engine: train_steps(engine, 4))
    roster = deal(plan, (2, 4, 2))
    with LocalCrew([swapped, from_disk, retaining], roster, tmp_path) as crew:
        engine = crew.start(initial())
        assert train_steps(engine, 4) == expected
        assert same_bits(crew.read_state(), state)
        assert not crew.failures


@pytest.mark.parametrize("line", [(0, 1), (0, 2), (1, 2)], ids=str)
def test_line_that_breaks_before_a_decision_costs_the_step_alone(line, tmp_path):
    plan = whole_plan()
    expected, state, _ = reference(plan, lambda engine: train_steps(engine, 6))
    with LocalCrew([one_group(plan)] * 3, deal(plan, (2, 3, 3)), tmp_path) as crew:
        engine = crew.start(initial())
        found = []
        for step in range(6):
            if step % 2:
                crew.cut_after(*line, frames=1 + step % 4)
            found += train_steps(engine, 1, first=step)
        assert found == expected
        assert same_bits(crew.read_state(), state)
        assert engine.last_problem, "a step was repeated"
        assert not crew.failures


@pytest.mark.parametrize(("end", "every"), [((0, 1), 19), ((1, 0), 19)], ids=["lead", "member"])
def test_line_that_breaks_again_and_again_costs_no_bit(end, every, tmp_path):
    """A step needs less frames than that; between steps, what breaks is an order or its reply."""
    plan = whole_plan()
    expected, state, _ = reference(plan, train_two_rounds)
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4)), tmp_path) as crew:
        engine = crew.start(initial())
        crew.cut_after(*end, frames=every, again=True)
        assert train_two_rounds(engine) == expected
        crew.cut_after(*end, frames=0)
        assert crew.links[0].opened(1) > 3
        assert same_bits(crew.read_state(), state)
        assert not crew.failures


# Every fourth one has each tier and each deal.
SAVED = list(
    itertools.product(["memory", "disk exact", "disk restart"], [(3, 5), (5, 3), (2, 3, 3)])
)


@pytest.mark.parametrize(("tier", "later"), one_in(4, SAVED), ids=str)
def test_crew_that_was_saved_goes_on_where_one_machine_does(tier, later, tmp_path):
    """Also where the blocks are dealt in another way then: what has moved is fetched."""
    plan, member = whole_plan(), bitwise.Case(MICRO_BATCHES, tier, "exact", 127, 127).plan()

    def train(engine):
        first = train_steps(engine, 2)
        list(engine.end_round(ENCODE, 1.0))
        return first, engine.state_dict()

    one = bitwise.open_engine(plan)
    first, saved = train(one)
    one.load_state_dict(saved)
    second = train_steps(one, 2, first=2)
    one.close()
    roster = deal(plan, (3, 5))
    with LocalCrew([one_group(plan), member], roster, tmp_path) as crew:
        engine = crew.start(initial())
        assert train(engine)[0] == first
        own = engine.state_dict()
    plans = [one_group(plan), *[member] * (len(later) - 1)]
    with LocalCrew(plans, deal(plan, later), tmp_path) as crew:
        engine = crew.start()
        engine.load_state_dict(own)
        assert train_steps(engine, 2, first=2) == second
        assert not crew.failures


@pytest.mark.parametrize("bits", [16, 8])
def test_boundaries_in_fewer_bits_train_nearly_the_same(bits, tmp_path):
    plan = whole_plan()
    expected, _, _ = reference(plan, lambda engine: train_steps(engine, 8))
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4), bits), tmp_path) as crew:
        engine = crew.start(initial())
        found = train_steps(engine, 8)
        assert found != expected and found == pytest.approx(expected, rel=0.02)
        sent = crew.links[1].bytes_sent
        assert sent < 8 * 2 * MICRO_BATCHES * crew.roster.boundary_bytes(1) + 1_000


def test_member_that_was_killed_costs_the_round_alone(tmp_path):
    """The crew goes on like one machine that was killed in that round and resumed."""
    plan = whole_plan()

    def train_round(engine):
        found = train_steps(engine, 2)
        list(engine.end_round(ENCODE, 1.0))
        return found, {name: each.clone() for name, each in engine.state_dict().items()}

    one = bitwise.open_engine(plan)
    first, saved = train_round(one)
    one.load_state_dict(saved)
    second = train_steps(one, 3, first=2)
    state = bitwise.read_state(one)
    one.close()
    with LocalCrew([one_group(plan)] * 3, deal(plan, (2, 3, 3)), tmp_path) as crew:
        engine = crew.start(initial())
        found, own = train_round(engine)
        assert found == first
        train_steps(engine, 1, first=2)
        crew.restart_member(1)
        with pytest.raises(RoundLostError, match="machine 1 of this crew has restarted"):
            train_steps(engine, 1, first=3)
        engine = crew.restart_lead()
        engine.load_state_dict(own)
        assert train_steps(engine, 3, first=2) == second
        assert same_bits(crew.read_state(), state)
        assert not crew.failures


@pytest.mark.parametrize("tier", ["memory", "disk exact", "disk restart"])
def test_lead_killed_while_it_saves_loses_that_round_alone(tier, tmp_path):
    """The member has saved then, and the lead has not; a disk has no older state to go back to."""
    plan, member = whole_plan(), bitwise.Case(MICRO_BATCHES, tier, "exact", 127, 127).plan()

    def train_round(engine, first):
        found = train_steps(engine, 2, first=first)
        list(engine.end_round(ENCODE, 1.0))
        return found, {name: each.clone() for name, each in engine.state_dict().items()}

    one = bitwise.open_engine(plan)
    before, saved = train_round(one, 0)
    one.load_state_dict(saved)
    expected, _ = train_round(one, 2)
    state = bitwise.read_state(one)
    one.close()
    with LocalCrew([one_group(plan), member], deal(plan, (3, 5)), tmp_path) as crew:
        engine = crew.start(initial())
        first, own = train_round(engine, 0)
        anchor = [each.clone() for each in crew.anchor.fragments]
        second, unsaved = train_round(engine, 2)
        assert (first, second) == (before, expected)
        engine = crew.restart_lead()
        crew.rebuilt |= dict(enumerate(anchor))
        engine.load_state_dict(own)
        assert same_bits(list(crew.anchor.fragments), anchor)
        again, saved_again = train_round(engine, 2)
        if tier == "memory":
            assert again == expected and same_bits(crew.read_state(), state)
        assert again == pytest.approx(expected, rel=0.1) and not crew.failures
        assert len({int(each["crew"]) for each in (own, unsaved, saved_again)}) == 3


def test_arrivals_since_the_last_save_are_added_once_on_a_disk_as_well(tmp_path):
    """A state on disk has them already when the crew begins again at its last saved round."""
    plan, member = whole_plan(), bitwise.Case(MICRO_BATCHES, "disk exact", "exact", 127, 127).plan()

    def train_round(engine):
        train_steps(engine, 2)
        list(engine.end_round(ENCODE, 1.0))
        return {name: each.clone() for name, each in engine.state_dict().items()}

    def train_with_arrival(engine):
        engine.queue_updates(other_update(5))
        return train_steps(engine, 2, first=2)

    with LocalCrew([one_group(plan), member], deal(plan, (3, 5)), tmp_path) as crew:
        engine = crew.start(initial())
        own = train_round(engine)
        anchor = [each.clone() for each in crew.anchor.fragments]
        train_with_arrival(engine)
        with_arrival = [each.clone() for each in crew.anchor.fragments]
        crew.restart_member(1)
        with pytest.raises(RoundLostError):
            train_steps(engine, 1, first=4)
        engine = crew.restart_lead()
        crew.rebuilt |= dict(enumerate(anchor))
        engine.load_state_dict(own)
        assert same_bits(list(crew.anchor.fragments), anchor)
        train_with_arrival(engine)
        engine.apply_queued()
        assert same_bits(list(crew.anchor.fragments), with_arrival)
        assert not crew.failures


def test_step_whose_loss_is_not_finite_drops_the_round_on_all_machines(tmp_path):
    plan = whole_plan()

    def train(engine):
        found = train_steps(engine, 1)
        rates = [float("nan"), 1.0]
        for step, rate in enumerate(rates, 1):
            text = bitwise.sample_text(MODEL, bitwise.SEQUENCES, seed=step)
            batches = list(text.split(bitwise.SEQUENCES // MICRO_BATCHES))
            stats = engine.step(batches, 1e30 if rate != rate else rate, position=step + 1)
            found.append(stats.abandoned)
        return found + train_steps(engine, 2, first=5)

    expected, state, _ = reference(plan, train)
    assert expected[3:5] == [False, True], "huge weights make the next loss infinite"
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4)), tmp_path) as crew:
        assert train(crew.start(initial())) == expected
        assert same_bits(crew.read_state(), state)
        assert not crew.failures


def test_sketches_come_from_the_machines_that_hold_the_fragments(tmp_path):
    plan, units = whole_plan(), initial()
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4)), tmp_path) as crew:
        engine = crew.start(units)
        received = crew.links[0].bytes_received
        crew.anchor.restore({}, {}, [compute_sketch(each) for each in units])
        assert all(map(crew.anchor.is_intact, range(len(units))))
        crew.anchor.restore({}, {}, [])
        whole = Anchor(units).checksum()
        assert crew.anchor.checksum() == whole
        assert crew.links[0].bytes_received == received, "no fragment crossed a line"
        replaced = units[6] + 1
        engine.replace_fragment(6, replaced)
        assert torch.equal(crew.anchor.fragments[6], replaced)
        with pytest.raises(StateError, match="no machine of it has the whole model"):
            engine.generate([], None, None)


def test_channel_ends_by_what_is_not_finite_and_the_step_is_repeated(tmp_path):
    plan = whole_plan()
    expected, _, _ = reference(plan, lambda engine: train_steps(engine, 2))
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4)), tmp_path) as crew:
        engine = crew.start(initial())
        found = train_steps(engine, 1)
        send, spoilt = crew.links[1].send_payload, []

        def spoil(number, of, payload):
            if of.kind is PieceKind.BOUNDARY and not spoilt:
                spoilt.append(of)
                payload = torch.full((len(payload) // 4,), torch.nan).numpy().tobytes()
            send(number, of, payload)

        crew.links[1].send_payload = spoil
        found += train_steps(engine, 1, first=1)
        assert found == expected and spoilt
        assert "machine 1 sent is of no use" in engine.last_problem
        assert not crew.failures


def test_member_whose_last_gradient_is_not_finite_is_the_one_named(tmp_path):
    plan = whole_plan()
    expected, _, _ = reference(plan, lambda engine: train_steps(engine, 1))
    with LocalCrew([one_group(plan)] * 3, deal(plan, (2, 3, 3)), tmp_path) as crew:
        engine = crew.start(initial())
        send, spoilt = crew.links[2].send_payload, []

        def spoil(number, of, payload):
            is_last = of.kind is PieceKind.BOUNDARY and of.key < 0 and of.part == MICRO_BATCHES - 1
            if is_last and not spoilt:
                spoilt.append(number)
                payload = torch.full((len(payload) // 4,), torch.nan).numpy().tobytes()
            send(number, of, payload)

        crew.links[2].send_payload = spoil
        assert train_steps(engine, 1) == expected
        assert spoilt == [1], "it went to a member, not to the lead"
        assert "what machine 2 sent is of no use" in engine.last_problem
        assert not crew.failures


def test_member_whose_payloads_are_not_what_their_digests_say_is_left_out(tmp_path):
    plan = whole_plan()
    with LocalCrew([one_group(plan)] * 2, deal(plan, (4, 4)), tmp_path, "iroh") as crew:
        engine = crew.start(initial())
        train_steps(engine, 1)
        send = crew.links[1].send_payload

        def spoil(number, of, payload):
            is_part = of.kind is PieceKind.ATTACHMENT
            send(number, of, bytes(reversed(payload)) if is_part else payload)

        crew.links[1].send_payload = spoil
        with pytest.raises(CrewError, match="machine 1 is left out of the crew: 3 times it sent"):
            list(engine.end_round(ENCODE, 1.0))
        assert crew.links[0].is_left_out(crew.roster.seats[1].key) and not crew.failures


@pytest.mark.parametrize("tier", ["memory", "disk exact"])
def test_lost_part_comes_from_the_ledger_with_a_warm_up(tier, tmp_path):
    plan, member = whole_plan(), bitwise.Case(MICRO_BATCHES, tier, "exact", 127, 127).plan()
    roster = deal(plan, (3, 5))
    with LocalCrew([one_group(plan), member], roster, tmp_path) as crew:
        engine = crew.start(initial())
        train_steps(engine, 2)
        list(engine.end_round(ENCODE, 1.0))
        own = {name: each.clone() for name, each in engine.state_dict().items()}
        anchor = [each.clone() for each in crew.anchor.fragments]
        loss = engine.evaluate([bitwise.sample_text(MODEL, 3, seed=77)])
    shutil.rmtree(tmp_path / "1")
    with LocalCrew([one_group(plan), member], roster, tmp_path) as crew:
        engine = crew.start()
        with pytest.raises(CrewError, match="neither the ledger nor a peer has it"):
            engine.load_state_dict(own)
        crew.rebuilt |= dict(enumerate(anchor))
        engine.load_state_dict(own)
        assert same_bits(list(crew.anchor.fragments), anchor)
        assert engine.evaluate([bitwise.sample_text(MODEL, 3, seed=77)]) == loss
        engine.progress = replace(engine.progress, position=2)
        assert crew.engines[1].progress.position == 2
        assert crew.engines[1].progress.warmup_steps_left == WARMUP_STEPS
        assert crew.engines[1].progress.optimizer_steps == 0
        assert train_steps(engine, 2, first=2)[-3] < loss
        assert not crew.failures
