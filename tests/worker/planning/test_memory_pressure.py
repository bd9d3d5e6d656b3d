"""When memory is short, and how much less a plan uses then."""

from hypothesis import given
from hypothesis import strategies as st

from barnraise.planning.hardware import memory_facts, parse_meminfo
from barnraise.planning.memory_pressure import (
    CALM_SECONDS,
    PAUSE_SECONDS,
    SHORT_SECONDS,
    SMALLER,
    MemoryFacts,
    PressureWatch,
    is_memory_short,
    low_mark,
    parse_pressure,
    smaller_budget,
)

GB = 10**9
ENOUGH = MemoryFacts(16 * GB, 6 * GB, 0.0)
LOW = MemoryFacts(16 * GB, GB // 4, 0.0)
STALLED = MemoryFacts(16 * GB, 2 * GB, 35.0)


def test_low_memory_and_waiting_programs_are_shortages():
    assert not is_memory_short(ENOUGH)
    assert is_memory_short(LOW)
    assert is_memory_short(STALLED)
    assert not is_memory_short(MemoryFacts(16 * GB, 2 * GB)), "without PSI"
    assert not is_memory_short(MemoryFacts(512 * GB, 2 * GB))


def test_only_a_shortage_that_lasts_needs_a_smaller_plan():
    watch = PressureWatch().observe(LOW, 100.0)
    assert not watch.is_short and watch.short_since == 100.0
    assert watch.observe(STALLED, 100.0 + SHORT_SECONDS).is_short
    recovered = watch.observe(ENOUGH, 105.0).observe(LOW, 100.0 + SHORT_SECONDS)
    assert not recovered.is_short


def test_next_smaller_plan_waits_until_the_last_has_had_its_effect():
    watch = PressureWatch().after_change(200.0)
    for now in (201.0, 201.0 + SHORT_SECONDS, 199.0 + PAUSE_SECONDS):
        watch = watch.observe(LOW, now)
        assert not watch.is_short
    assert watch.observe(LOW, 200.0 + PAUSE_SECONDS).is_short


@given(
    planned=st.integers(10**6, 10**12),
    total=st.integers(10**8, 10**12),
    available=st.integers(0, 10**12),
)
def test_smaller_budget_is_smaller_and_not_tiny(planned, total, available):
    budget = smaller_budget(planned, MemoryFacts(total, available))
    assert planned // 4 <= budget <= SMALLER * planned


def test_smaller_budget_frees_what_is_missing():
    facts = MemoryFacts(100 * GB, 0)
    assert smaller_budget(8 * GB, facts) == 8 * GB - 2 * low_mark(100 * GB)


def test_pressure_is_the_time_in_which_all_tasks_waited():
    text = (
        "some avg10=63.20 avg60=20.02 avg300=4.10 total=4294967\n"
        "full avg10=12.50 avg60=9.00 avg300=1.00 total=429496\n"
    )
    assert parse_pressure(text) == 12.5
    assert parse_pressure("some avg10=1.00 avg60=0.00\n") is None
    assert parse_pressure("full avg10=x\n") is None and parse_pressure("\n\n") is None


def test_available_memory_is_read_as_linux_states_it():
    assert parse_meminfo("MemTotal: 16 kB\nMemAvailable:    9 kB\n") == 9 * 1024
    assert parse_meminfo("MemTotal: 16 kB\n") is None, "a kernel before 3.14"


def test_facts_of_this_machine_are_plausible():
    facts = memory_facts()
    assert 0 < facts.available <= facts.total
    assert facts.stalled is None or 0 <= facts.stalled <= 100


@given(st.integers(1, 6), st.floats(0.0, 1e6))
def test_plan_grows_only_after_a_calm_that_doubles_with_each_shortage(shortages, ended):
    watch = PressureWatch()
    for _ in range(shortages):
        watch = watch.after_change(ended)
    calm = CALM_SECONDS * 2 ** (shortages - 1)
    assert not watch.observe(ENOUGH, ended + calm - 1).may_grow
    assert not watch.observe(LOW, ended + calm + 1).may_grow
    due = watch.observe(ENOUGH, ended + calm + 1)
    assert due.may_grow
    assert not due.after_growth(ended + calm + 1, True).observe(ENOUGH, 1e9).may_grow
    refused = due.after_growth(ended + calm + 1, False)
    assert not refused.observe(ENOUGH, ended + calm + 2).may_grow
    assert refused.observe(ENOUGH, ended + 2 * calm + 2).may_grow


def test_machine_that_was_never_short_has_nothing_to_grow():
    assert not PressureWatch().observe(ENOUGH, 1e9).may_grow
