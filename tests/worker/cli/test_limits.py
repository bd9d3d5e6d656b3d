"""Test `barnraise limits`: limits are shown, saved and lifted."""

import json
import re

import pytest
from helpers.worker.command_line import assert_fails, call_barnraise, invoke

from barnraise.cli.limits import explain_limits, summarise_limits
from barnraise.cli.resource_options import LimitOptions
from barnraise.errors import PlanError, StateError
from barnraise.planning.limits import Limits
from barnraise.state_dir import StateDir
from barnraise.training.limits.machine_facts import LinuxFacts


def test_limits_last_until_they_are_lifted(tmp_path):
    options = ("--memory", "4GB", "--moments-8bit", "--clipping", "layer", "--deterministic")
    assert call_barnraise(tmp_path, "limits", *options).returncode == 0
    assert StateDir(tmp_path).limits == Limits(
        memory=4 * 10**9, moments_bits=8, clipping="layer", deterministic=True
    )
    options = ("--memory", "auto", "--disk", "1TB", "--uplink", "250KB", "--nondeterministic")
    result = call_barnraise(tmp_path, "limits", *options, "--json")
    assert json.loads(result.stdout)["memory"] is None
    assert StateDir(tmp_path).limits == Limits(
        disk=10**12, uplink=250_000, moments_bits=8, clipping="layer"
    )


def test_limits_are_shown_with_their_units(tmp_path):
    StateDir(tmp_path).limits = Limits(memory=4 * 10**9, uplink=250_000, disk=0)
    output = call_barnraise(tmp_path, "limits").stdout
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "memory 4 GB" in lines and "disk 0 kB" in lines and "uplink 250 kB/s" in lines
    assert "GPU memory no limit" in lines and "optimizer moments 32 bits" in lines


def test_limits_within_which_nothing_trains_say_so(tmp_path):
    refused = call_barnraise(tmp_path, "limits", "--memory", "10MB")
    warning = " ".join(refused.stderr.split())
    assert refused.returncode == 0 and warning.startswith("gpt-nano: ")
    assert "your limits: memory 10 MB" in warning and "needs" in warning
    assert not call_barnraise(tmp_path, "limits", "--memory", "1GB").stderr


def test_limit_on_disk_writes_is_shown_even_if_nobody_set_it(tmp_path):
    shown = " ".join(call_barnraise(tmp_path, "limits").stdout.split())
    assert re.search(r"disk writes per day [\d.,]+ .B, 0\.3 times the drive's size", shown)
    for option, text in (("unlimited", "no limit"), ("40GB", "40 GB")):
        output = call_barnraise(tmp_path, "limits", "--disk-writes-per-day", option).stdout
        assert f"disk writes per day {text}" in " ".join(output.split())


def test_announced_addresses_and_port_mapping_are_saved_and_lifted(tmp_path):
    options = ("--announce", "5.9.1.1:45555", "--announce", "home.example.org:45555")
    call_barnraise(tmp_path, "limits", *options, "--no-port-mapping")
    limits = StateDir(tmp_path).limits
    assert limits.announce == ("5.9.1.1:45555", "home.example.org:45555")
    assert not limits.port_mapping
    assert_fails(call_barnraise(tmp_path, "limits", "--announce", "5.9.1.1"), "is not HOST:PORT")
    shown = call_barnraise(tmp_path, "limits", "--announce", "auto", "--port-mapping").stdout
    assert "announced addresses none" in " ".join(shown.split())
    assert StateDir(tmp_path).limits == Limits()


def test_invalid_or_damaged_limits_are_a_sentence(tmp_path):
    assert_fails(
        call_barnraise(tmp_path, "limits", "--clipping", "hard"), "clipping must be one of"
    )
    (tmp_path / "limits.json").write_text("{")
    assert_fails(call_barnraise(tmp_path, "limits"), "is damaged")


@pytest.mark.parametrize(
    ("name", "effect"),
    [("memory", "train nothing"), ("device_memory", "compute nothing"), ("uplink", "send nothing")],
)
@pytest.mark.parametrize("zero", ["0", "0KB", "0.3"])
def test_limit_of_zero_is_refused_where_it_makes_no_sense(name, effect, zero):
    sentence = f"0 would {effect}; 'auto' is no limit"
    with pytest.raises(StateError, match=sentence):
        LimitOptions(**{name: zero}).apply_to(Limits())
    LimitOptions(disk=zero, disk_writes_per_day=zero).apply_to(Limits())


def test_saved_limit_of_zero_is_a_sentence_with_the_remedy(tmp_path):
    (tmp_path / "limits.json").write_text('{"uplink": 0}')
    with pytest.raises(StateError, match=r"limits.json: uplink: 0 would send .* Remove it"):
        _ = StateDir(tmp_path).limits
    (tmp_path / "limits.json").write_text('{"uplink": 1e400}')
    with pytest.raises(StateError, match=r"limits.json: the limit on uplink cannot be .*: inf"):
        _ = StateDir(tmp_path).limits


def test_limits_that_an_earlier_version_saved_are_read(tmp_path):
    (tmp_path / "limits.json").write_text('{"threads": 3, "compiled": true}')
    assert StateDir(tmp_path).limits == Limits(threads=3)


def test_refusal_to_train_names_the_limits_in_force():
    refusal = PlanError("this model does not fit")
    assert explain_limits(refusal, Limits()) is refusal
    sentence = str(explain_limits(refusal, Limits(memory=10**8, uplink=10**6)))
    assert (
        "memory 100 MB, uplink 1 MB/s" in sentence and "barnraise limits --memory auto" in sentence
    )


RULES = (
    ("--hours", "mon-fri 19:00-07:00, sat-sun", "hours mon-fri 19:00-07:00, sat-sun"),
    ("--on-battery", "yes", "on battery trains"),
    ("--busy-cpu", "50", "busy CPU pauses above 50 % by other programs"),
    ("--pause-for", "blender, steam", "pauses for blender, steam"),
    ("--threads", "3", "threads 3"),
    ("--cpu", "50%", "CPU time 50 %"),
    ("--month-up", "20GB", "upload per month 20 GB"),
    ("--download", "1MB", "download 1 MB/s"),
)


def test_rules_are_saved_shown_and_lifted(tmp_path, monkeypatch):
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    options = [part for option, value, _ in RULES for part in (option, value)]
    lines = [" ".join(line.split()) for line in invoke("limits", *options).splitlines()]
    assert all(text in lines for _, _, text in RULES), lines
    limits = StateDir(tmp_path).limits
    assert limits.pause_for == ("blender", "steam") and limits.on_battery and limits.threads == 3
    invoke("limits", *(part for option, _, _ in RULES for part in (option, "auto")))
    assert StateDir(tmp_path).limits == Limits()


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--hours", "25:00-26:00", "there is no 25:00; write it like 19:00-07:00"),
        ("--hours", "fri", 'write it like "fri 19:00-24:00"'),
        ("--hours", "07:00-07:00", "a whole day is 00:00-24:00"),
        ("--hours", "", 'write it like "sat-sun"'),
        ("--idle", "-1", "like --idle 10: from 1 to 1440, not -1"),
        ("--idle", "soon", "like --idle 10; 'soon' is no whole number"),
        ("--on-battery", "maybe", "like --on-battery no; 'maybe' is neither"),
        ("--busy-cpu", "100", "like --busy-cpu 50: from 1 to 99, not 100"),
        ("--cpu", "0", "like --cpu 50: from 1 to 100, not 0"),
        ("--max-temperature", "20", "like --max-temperature 85: from 40 to 110, not 20"),
        ("--pause-for", "", "write it like --pause-for blender,steam"),
        ("--pause-for", "/usr/bin/blender", "without folders"),
        ("--threads", "0", "like --threads 4: from 1 to 4096, not 0"),
        ("--month-up", "0", "0 would send nothing"),
        ("--download", "1KB", "write at least --download 20KB"),
    ],
)
def test_bad_rule_is_one_sentence_with_an_example(tmp_path, monkeypatch, option, value, sentence):
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    with pytest.raises(StateError) as raised:
        invoke("limits", "--memory", "4GB", option, value)
    assert sentence in str(raised.value) and "\n" not in str(raised.value)
    assert not (tmp_path / "limits.json").exists(), "nothing is saved"


def test_rule_that_this_machine_cannot_obey_is_refused_with_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("BARNRAISE_HOME", str(tmp_path))
    monkeypatch.setattr(LinuxFacts, "read_idle_seconds", lambda facts: None)
    with pytest.raises(StateError, match="no X display here, and logind knows no graphical"):
        invoke("limits", "--idle", "5")
    monkeypatch.setattr(LinuxFacts, "read_idle_seconds", lambda facts: 3.0)
    invoke("limits", "--idle", "5")
    assert StateDir(tmp_path).limits.idle == 5


def test_panel_names_the_rules_that_are_set():
    assert summarise_limits(Limits()) == ""
    limits = Limits(memory=10**9, hours="sat-sun", cpu=50)
    assert summarise_limits(limits) == "memory 1 GB, hours sat-sun, CPU time 50 %"
