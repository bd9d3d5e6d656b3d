"""Test the estimate of a run: the planner's step time and the traffic between machines."""

import re
from dataclasses import replace

import pytest
from django.test import Client
from helpers.paths import ROOT
from helpers.python_code import run_python
from helpers.site.pages import open_client

from barnraise.planning.lines import HOME_LINE, LINES, Line
from barnraise.protocol import reports
from barnraise.spec import ADAMW, MUON, PRESETS, RunSpec
from coordinator.fleet.machine_state import HardwareMeasurement
from coordinator.runs.estimate import estimate, estimate_run_time
from coordinator.runs.join_policy import JoinPolicy
from coordinator.runs.optimizer_choice import STEPS_RATIO, compare_optimizers
from coordinator.runs.reference_machines import LAPTOP, REFERENCE_MACHINES
from coordinator.runs.spec_form import spec_from_fields
from coordinator.web.templatetags.barnraise import span

# The smallest, one that streams on most machines, and the largest; `make test-all` tries all.
SOME_PRESETS = {"gpt-nano", "gpt2-774m", "gpt3-175b"}

SLOW_LINE = Line("Slow line", 20, 20)
FORM = {"name": "x", "preset": "gpt-nano"}


def build_spec(preset: str = "gpt2-124m", **changed) -> RunSpec:
    """Build a spec from a preset; `recipe__codec` changes the field "recipe.codec"."""
    fields = {"recipe.codec": "auto", "recipe.token_budget": 10**9, "seed": 1}
    return spec_from_fields(
        {**fields, **{name.replace("__", "."): value for name, value in changed.items()}}, preset
    )


def test_larger_gpu_is_never_slower_and_all_train_a_small_model():
    laptop, small, large = estimate(build_spec(), list(REFERENCE_MACHINES), 10)
    assert not (laptop.refusal or small.refusal or large.refusal)
    assert 0 < laptop.tokens_per_second < small.tokens_per_second < large.tokens_per_second
    for need in (laptop, small, large):
        assert [p.line for p in need.run_times] == list(LINES)
        assert need.run_times[0].seconds >= need.run_times[1].seconds > 0


def test_machine_too_small_is_refused_with_what_is_short():
    (need,) = estimate(build_spec("gpt3-175b"), [("laptop", LAPTOP)], 10)
    assert "does not fit" in need.refusal and "disk" in need.refusal and need.run_times == ()


@pytest.mark.parametrize(
    "preset",
    [
        name if name in SOME_PRESETS else pytest.param(name, marks=pytest.mark.slow)
        for name in PRESETS
    ],
)
def test_every_preset_is_estimated_within_seconds_on_every_kind_of_machine(preset):
    for need in estimate(build_spec(preset), list(REFERENCE_MACHINES), 100):
        assert need.refusal or all(p.seconds > 0 and p.schedule.steps >= 1 for p in need.run_times)


def test_twice_the_volunteers_take_half_the_time_on_fast_lines():
    one, two, four = (
        estimate_run_time(build_spec("gpt-nano"), 10.0, LINES[1], n) for n in (1, 2, 4)
    )
    assert one.slowdown == two.slowdown == four.slowdown == 1.0
    assert one.seconds == pytest.approx(2 * two.seconds) == pytest.approx(4 * four.seconds)
    assert one.traffic == 0, "a single machine has no traffic"


def test_volunteers_beyond_the_line_speed_train_no_faster():
    """Every update passes over every line, so a full line bounds the speed of the run."""
    dense_spec = build_spec(recipe__codec="dense8")
    few = estimate_run_time(dense_spec, 1.0, SLOW_LINE, 50)
    many = estimate_run_time(dense_spec, 1.0, SLOW_LINE, 500)
    assert few.slowdown > 1 and many.seconds == pytest.approx(few.seconds, rel=0.05)
    assert few.traffic == pytest.approx(0.8 * 20e6 / 8)
    auto_estimate = estimate_run_time(build_spec(), 1.0, SLOW_LINE, 50)
    assert auto_estimate.seconds < few.seconds, "automatic compression is no faster"
    assert auto_estimate.schedule.scheme.bits_per_parameter < dense_spec.recipe.round_steps


def test_estimate_states_which_strategy_suits_the_line():
    home = estimate_run_time(build_spec(), 1.0, HOME_LINE, 4)
    fastest = home.choice.fastest_of_each()
    speeds = {each.strategy: each.tokens_per_second for each in fastest}
    assert home.choice.chosen.strategy == "updates"
    assert speeds["updates"] > 50 * speeds["data-parallel"]
    rack = estimate_run_time(build_spec(), 1.0, Line("Rack", 100_000, 100_000), 4)
    assert rack.choice.chosen.strategy != "updates"


def test_step_time_of_many_sequences_scales_linearly():
    specs = [build_spec(recipe__step_sequences=n, recipe__round_steps=1) for n in (64, 55_440)]
    (small,), (large,) = (estimate(run_spec, [REFERENCE_MACHINES[2]], 1) for run_spec in specs)
    assert large.step_seconds == pytest.approx(small.step_seconds * 55_440 / 64)


def test_estimate_module_imports_no_torch():
    """Importing torch would cost each process of the site a gigabyte."""
    script = (
        "import importlib.util, sys\n"
        "import coordinator.runs.reference_machines\n"
        "path = 'platform/coordinator/runs/estimate.py'\n"
        "spec = importlib.util.spec_from_file_location('estimate', path)\n"
        "module = importlib.util.module_from_spec(spec)\n"
        "sys.modules['estimate'] = module\n"
        "spec.loader.exec_module(module)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = run_python(script, cwd=ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4231, "0.42 s"),
        (35, "35 s"),
        (720, "12 min"),
        (12_240, "3.4 h"),
        (5.25 * 86_400, "5.2 days"),
        (400 * 86_400, "400 days"),
        (8 * 31_557_600, "8 years"),
        (float("inf"), "for ever"),
    ],
)
def test_span_formats_a_duration_in_one_unit(seconds, text):
    assert span(seconds) == text


# ---- the form and the run's page


@pytest.fixture
def request_estimate(person):
    def post(owner=None, **fields) -> str:
        client = open_client(owner or person())
        answer = client.post("/runs/estimate/", {**FORM, **fields})
        assert answer.status_code == 200
        return answer.content.decode()

    return post


@pytest.mark.django_db
def test_form_estimates_typical_and_own_machines(
    person, volunteer, request_estimate, golden_hardware
):
    ada = person()
    machine, _ = volunteer(ada, 1), volunteer(ada, 2)
    HardwareMeasurement.record(machine.machine, golden_hardware)
    HardwareMeasurement.record(volunteer(person("bob@example.org"), 3).machine, golden_hardware)
    html = request_estimate(ada, preset="gpt2-124m", volunteers="25")
    assert all(name in html for name in ("8 GB laptop", "12 GB GPU", "24 GB GPU", "pc-1"))
    assert "With 25 machines (12 GB GPU each) on home lines" in html
    assert "25 of these, 15 Mb/s up, 112 down" in html and "25 of these, 100 Mb/s" in html
    assert "tokens/s" in html
    assert "pc-2: not measured yet" in html and "pc-3" not in html


@pytest.mark.django_db
def test_form_states_by_how_much_machines_end_sooner(request_estimate, person):
    ada = person()
    fields = {"preset": "gpt2-124m", "recipe.codec": "auto", "recipe.token_budget": "2.4B"}
    html = request_estimate(ada, volunteers="4", **fields)
    gain = r"With 4 machines on home lines this run ends \d\.\d × sooner than with one, at the same"
    assert re.search(gain, html)
    assert "not measured for so many machines" in request_estimate(ada, volunteers="32", **fields)
    for nothing in ({"volunteers": "1"}, {"recipe.strategy": "decentralized-adam"}):
        assert "sooner than with" not in request_estimate(
            ada, **{**fields, "volunteers": "4", **nothing}
        )


@pytest.mark.django_db
def test_run_page_states_what_one_more_machine_gains(person, launched_run):
    run, _ = launched_run(person("owner@example.org"), spec=build_spec())
    page = Client().get(f"/runs/{run.slug}/fits/").content.decode()
    assert "With 2 machines on home lines" in page and "than with one, at the same loss" in page


@pytest.mark.django_db
def test_form_compares_both_optimizers_at_equal_loss(request_estimate, person):
    ada = person()
    fields = {"preset": "gpt2-124m", "recipe.token_budget": "2.4B"}
    with_adamw = request_estimate(ada, **fields)
    assert "AdamW (chosen)" in with_adamw and "measured on 0.64 M parameters" in with_adamw
    with_muon = request_estimate(ada, **fields, **{"recipe.optimizer": "muon"})
    assert "Muon (chosen)" in with_muon and "AdamW (chosen)" not in with_muon
    mixing = request_estimate(ada, **fields, **{"recipe.strategy": "decentralized-adam"})
    assert "To the same loss" not in mixing, "only AdamW trains what is averaged"


def test_optimizers_are_compared_with_the_steps_that_each_needs():
    machine = REFERENCE_MACHINES[1]
    short = compare_optimizers(build_spec(recipe__step_sequences=2), machine, 1)
    long = compare_optimizers(build_spec(recipe__step_sequences=64), machine, 1)
    assert 1.0 < long.step_ratio < 1.1 < short.step_ratio
    for each in (short, long):
        ratio = each.seconds[MUON] / each.seconds[ADAMW]
        assert ratio == pytest.approx(STEPS_RATIO * each.step_ratio, rel=0.02)
    muon = compare_optimizers(
        build_spec(recipe__step_sequences=64, recipe__optimizer="muon"), machine, 1
    )
    assert muon.seconds[ADAMW] == pytest.approx(long.seconds[ADAMW] / STEPS_RATIO, rel=0.02)
    assert muon.seconds[MUON] < muon.seconds[ADAMW]


@pytest.mark.django_db
def test_estimate_of_an_invalid_form_shows_the_problem(request_estimate, person):
    ada = person()
    assert "One field needs fixing" in request_estimate(ada, **{"model.heads": "5"})
    assert "does not fit" in request_estimate(ada, preset="gpt3-175b")
    for typed in ("", "-3", "lots", "1e9", "²", "99999999999999999999"):
        assert "of these" in request_estimate(ada, volunteers=typed)
    assert "of these" in request_estimate(ada, name=""), "the estimate requires a name"


@pytest.mark.django_db
def test_machine_with_the_slowest_rates_is_estimated(
    volunteer, person, request_estimate, golden_hardware
):
    ada = volunteer(person())
    slow = {
        name: 1.0
        for name in ("adam", "attention", "disk_read", "disk_write", "stream", "to_device")
    }
    hardware = golden_hardware.model_copy(
        update={**slow, "matmul": [(1, 1.0)], "products": [], "updates": [], "memory": 1 << 62}
    )
    HardwareMeasurement.record(
        ada.machine, reports.HardwareView.model_validate(hardware.model_dump())
    )
    assert "pc-1" in request_estimate(ada.machine.owner)


def read_fits(client: Client, run) -> dict[str, tuple[str, str]]:
    """Return machine name → (whether it fits, explanation) from the run's page."""
    html = client.get(f"/runs/{run.slug}/fits/").content.decode()
    entries = re.findall(r'data-fits="(\w+)"><b>(.*?)</b> <span class="number">(.*?)</span>', html)
    return {name: (answer, text) for answer, name, text in entries}


@pytest.mark.django_db
def test_run_page_names_crews_where_a_machine_is_too_weak(person, launched_run):
    run, _ = launched_run(
        person("owner@example.org"), join_policy=JoinPolicy(min_memory=10 * 10**9)
    )
    page = Client().get(f"/runs/{run.slug}/fits/").content.decode()
    assert f"<code>barnraise join {run.slug} --crew</code>" in page


@pytest.mark.django_db
def test_run_page_names_no_crew_where_all_machines_fit(person, launched_run):
    run, _ = launched_run(person("owner@example.org"))
    assert "--crew" not in Client().get(f"/runs/{run.slug}/fits/").content.decode()


@pytest.mark.django_db
def test_run_page_shows_whether_machines_fit(volunteer, person, launched_run, golden_hardware):
    run, _ = launched_run(
        person("owner@example.org"),
        join_policy=JoinPolicy(min_memory=10 * 10**9, min_device_memory=16 * 10**9),
    )
    answers = read_fits(Client(), run)
    assert answers["8 GB laptop"][0] == "no"
    assert "asks for 10 GB of memory" in answers["8 GB laptop"][1]
    assert answers["12 GB GPU"] == (
        "no",
        f"The run {run.name} asks for 16 GB of GPU memory; this machine has 12 GB.",
    )
    assert answers["24 GB GPU"][0] == "yes" and answers["24 GB GPU"][1].endswith("tokens/s")
    bob = volunteer(person("bob@example.org"), 2)
    client = open_client(bob.machine.owner)
    assert read_fits(client, run)["pc-2"] == ("unknown", "measured when it joins")
    HardwareMeasurement.record(
        bob.machine, golden_hardware.model_copy(update={"device_memory": 8 * 2**30})
    )
    assert read_fits(client, run)["pc-2"][0] == "no"
    HardwareMeasurement.record(
        bob.machine, golden_hardware.model_copy(update={"device_memory": 24 * 2**30})
    )
    assert read_fits(client, run)["pc-2"][0] == "yes"


def test_plan_is_cached_for_the_same_machine_and_model():
    from coordinator.runs.estimate import cached_plan

    cached_plan.cache_clear()
    for budget in (10**6, 10**7, 10**8):
        estimate(replace(build_spec("gpt-nano"), seed=budget), list(REFERENCE_MACHINES), 10)
    assert cached_plan.cache_info().misses == len(REFERENCE_MACHINES)
