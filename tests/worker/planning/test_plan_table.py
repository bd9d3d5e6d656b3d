"""Plans for a table of GPUs, memories and presets obey every rule, and the document shows them."""

import itertools
import re
from dataclasses import replace

import pytest
from helpers.drill_modules import import_drill_module
from helpers.effort import one_in

from barnraise.planning import search
from barnraise.planning.budgets import compute_budgets
from barnraise.planning.limits import Limits
from barnraise.spec import PRESETS

bench_plans = import_drill_module("bench_plans")
plan_table = import_drill_module("plan_table")
price_measured_steps = bench_plans.price_measured_steps
CARDS, MEMORIES = plan_table.CARDS, plan_table.MEMORIES
SHOWN_MEMORIES, SHOWN_MODELS = plan_table.SHOWN_MEMORIES, plan_table.SHOWN_MODELS
CELL = re.compile(
    r"([\d.,e+-]+), (?:GPU|RAM|disk|\d+ on GPU)(?:; [a-z ]+)?(?:, ([\d.,]+) ([TGM])B/day)?"
)
CARD_MEMORIES = (4, 8, 12, 16, 24, 80)  # in GB
SOME_CARD_MEMORIES = (4, 12, 80)
SAMPLE = list(itertools.product(CARDS, MEMORIES, PRESETS))[5::29]
SHOWN_SAMPLE = list(itertools.product(CARDS, SHOWN_MEMORIES, SHOWN_MODELS))[3::11]


def check_cell(cell) -> None:
    """Check that a plan stays within what is free, less the margins, and within a day's writes."""
    plan = cell.plan
    if plan is None:
        assert "does not fit" in cell.refusal
        return
    hardware = plan_table.describe_machine(cell.card, cell.memory)
    budgets = compute_budgets(hardware, Limits())
    assert plan.device_bytes <= hardware.device_memory_free * 0.97 - 192e6
    assert budgets.device_overhead >= 0.03 * hardware.device_memory_free + 192e6
    assert plan.host_bytes <= hardware.memory * 0.85 - 1.5e9
    assert plan.disk_bytes <= hardware.disk * 0.95
    assert plan.written_per_day <= 0.3 * hardware.disk_size * 1.001
    assert plan.written_per_step <= 0.3 * hardware.disk_size
    assert plan.step_seconds > 0


def check_order(cells) -> None:
    """Check that each of the cells, in order of memory, is as fast as the one before.

    Within 0.5 %: the search does not simulate plans that can be faster by less than TOLERANCE. It
    prefers exact clipping and exact crash safety where they cost less than EXACT_COSTS.
    """
    for less, more in itertools.pairwise(cells):
        if less.plan is None:
            continue
        assert more.plan is not None, (more.card.name, more.memory, more.model, more.refusal)
        allowed = 1.005
        allowed *= search.EXACT_COSTS if more.plan.clipping != less.plan.clipping else 1.0
        allowed *= search.EXACT_COSTS if more.plan.crash_safety != less.plan.crash_safety else 1.0
        assert more.tokens_per_second * allowed >= less.tokens_per_second


def read_document() -> dict[tuple[str, str], list[str]]:
    """Map (card, preset) → the cells of the document, in order of memory."""
    rows = {}
    for line in plan_table.DOCUMENT.read_text().splitlines():
        parts = [part.strip() for part in line.strip("|").split("|")]
        if len(parts) == 2 + len(SHOWN_MEMORIES) and parts[1] in PRESETS:
            rows[parts[0], parts[1]] = parts[2:]
    return rows


def rate_of(text: str) -> float:
    """Return the tokens/s of a cell of the document; 0 for a refusal."""
    match = CELL.fullmatch(text)
    assert match or text == "–", text
    return float(match[1].replace(",", "")) if match else 0.0


@pytest.mark.parametrize(
    "place",
    one_in(5, [(place,) for place in SAMPLE]),
    ids=lambda place: f"{place[0].name}-{place[1:]}",
)
def test_plan_of_the_table_obeys_every_budget(place):
    check_cell(plan_table.compute_cell(place))


@pytest.mark.parametrize(
    "place",
    one_in(5, [(place,) for place in SHOWN_SAMPLE]),
    ids=lambda place: f"{place[0].name}-{place[1:]}",
)
def test_document_shows_what_the_planner_decides(place):
    card, memory, model = place
    cell = plan_table.compute_cell(place)
    check_cell(cell)
    shown = read_document()[card.name, model][SHOWN_MEMORIES.index(memory)]
    message = "write the document again: python benchmarks/swap/plan_table.py --write"
    assert (cell.plan is None) == (shown == "–"), message
    assert rate_of(shown) == pytest.approx(cell.tokens_per_second, rel=0.15), message


def test_document_has_every_card_and_is_monotone_in_memory():
    rows = read_document()
    assert set(rows) == set(itertools.product((card.name for card in CARDS), SHOWN_MODELS))
    for place, cells in rows.items():
        assert len(cells) == len(SHOWN_MEMORIES)
        rates = [rate_of(cell) for cell in cells]
        for less, more in itertools.pairwise(rates):
            # Rates have two digits; see `check_order` for the rest.
            assert more >= less * 0.9 / (1.005 * search.EXACT_COSTS**2), (place, rates)


def test_no_plan_of_the_document_writes_more_than_the_day_allows():
    for cells in read_document().values():
        for match in filter(None, map(CELL.fullmatch, cells)):
            if match[2]:
                scale = {"T": 1e12, "G": 1e9, "M": 1e6}[match[3]]
                assert float(match[2].replace(",", "")) * scale <= 300e9


@pytest.mark.parametrize(
    ("model", "memories"),
    [
        ("gpt2-1.5b", SOME_CARD_MEMORIES),
        pytest.param("gpt2-1.5b", CARD_MEMORIES, marks=pytest.mark.slow),
        pytest.param("gpt3-2.7b", CARD_MEMORIES, marks=pytest.mark.slow),
    ],
)
def test_more_memory_on_the_same_card_is_never_slower(model, memories):
    card = next(card for card in CARDS if card.name == "RTX 4090")
    cells = [
        plan_table.compute_cell((replace(card, memory=memory), 64, model)) for memory in memories
    ]
    check_order(cells)
    assert cells[-1].tokens_per_second > cells[0].tokens_per_second


def test_prices_of_measured_steps_are_within_a_tenth():
    """The rates, the plans and the seconds are an H200's; a small model's price may err by more."""
    errors = {name: priced / seconds - 1 for name, priced, seconds in price_measured_steps()}
    assert set(errors) == {"no limit", "24 GB", "8 GB", "6.4M, two workers on the card"}
    for name, error in errors.items():
        assert abs(error) <= (0.3 if name.startswith("6.4M") else 0.1), errors


@pytest.mark.parametrize(("memory", "share"), one_in(2, [(24, 0.78), (8, 0.60)]))
def test_programs_keep_a_limited_card_busy(memory, share):
    rows = bench_plans.read_lines(bench_plans.EARLIER_PLANS)
    (row,) = (row for row in rows if (row["card"], row["memory"]) == ("H200", memory))
    compared = bench_plans.compare(row)
    assert compared.after >= share * compared.in_memory
    assert compared.after > 1.1 * compared.before


@pytest.mark.slow
def test_whole_table_obeys_the_rules_and_is_what_the_document_shows():
    cells = list(plan_table.compute_cells())
    assert len(cells) == len(CARDS) * len(MEMORIES) * len(PRESETS)
    for cell in cells:
        check_cell(cell)
    for card, model in itertools.product(CARDS, PRESETS):
        check_order([cell for cell in cells if cell.card == card and cell.model == model])
    shown = [cell for cell in cells if cell.memory in SHOWN_MEMORIES and cell.model in SHOWN_MODELS]
    assert plan_table.format_document(shown) == plan_table.read_parts()[0]
