"""Test `barnraise limits`: limits are shown, saved and lifted."""

import json
import re

import pytest
from helpers.worker.command_line import assert_fails, run_barnraise

from barnraise.cli.limits import explain_limits
from barnraise.cli.resource_options import LimitOptions
from barnraise.errors import PlanError, StateError
from barnraise.planning.limits import Limits
from barnraise.state_dir import StateDir


def test_limits_last_until_they_are_lifted(tmp_path):
    options = ("--memory", "4GB", "--moments-8bit", "--clipping", "layer", "--deterministic")
    assert run_barnraise(tmp_path, "limits", *options).returncode == 0
    assert StateDir(tmp_path).limits == Limits(
        memory=4 * 10**9, moments_bits=8, clipping="layer", deterministic=True
    )
    options = ("--memory", "auto", "--disk", "1TB", "--uplink", "250KB", "--nondeterministic")
    result = run_barnraise(tmp_path, "limits", *options, "--json")
    assert json.loads(result.stdout)["memory"] is None
    assert StateDir(tmp_path).limits == Limits(
        disk=10**12, uplink=250_000, moments_bits=8, clipping="layer"
    )


def test_limits_are_shown_with_their_units(tmp_path):
    StateDir(tmp_path).limits = Limits(memory=4 * 10**9, uplink=250_000, disk=0)
    output = run_barnraise(tmp_path, "limits").stdout
    lines = [" ".join(line.split()) for line in output.splitlines()]
    assert "memory 4 GB" in lines and "disk 0 kB" in lines and "uplink 250 kB/s" in lines
    assert "device memory no limit" in lines and "optimizer moments 32 bits" in lines


def test_limit_on_disk_writes_is_shown_even_if_nobody_set_it(tmp_path):
    shown = " ".join(run_barnraise(tmp_path, "limits").stdout.split())
    assert re.search(r"disk writes per day [\d.,]+ .B, 0\.3 times the drive's size", shown)
    for option, text in (("unlimited", "no limit"), ("40GB", "40 GB")):
        output = run_barnraise(tmp_path, "limits", "--disk-writes-per-day", option).stdout
        assert f"disk writes per day {text}" in " ".join(output.split())


def test_announced_addresses_and_port_mapping_are_saved_and_lifted(tmp_path):
    options = ("--announce", "5.9.1.1:45555", "--announce", "home.example.org:45555")
    run_barnraise(tmp_path, "limits", *options, "--no-port-mapping")
    limits = StateDir(tmp_path).limits
    assert limits.announce == ("5.9.1.1:45555", "home.example.org:45555")
    assert not limits.port_mapping
    assert_fails(run_barnraise(tmp_path, "limits", "--announce", "5.9.1.1"), "is not HOST:PORT")
    shown = run_barnraise(tmp_path, "limits", "--announce", "auto", "--port-mapping").stdout
    assert "announced addresses none" in " ".join(shown.split())
    assert StateDir(tmp_path).limits == Limits()


def test_invalid_or_damaged_limits_are_a_sentence(tmp_path):
    assert_fails(run_barnraise(tmp_path, "limits", "--clipping", "hard"), "clipping must be one of")
    (tmp_path / "limits.json").write_text("{")
    assert_fails(run_barnraise(tmp_path, "limits"), "is damaged")


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


def test_refusal_to_train_names_the_limits_in_force():
    refusal = PlanError("this model does not fit")
    assert explain_limits(refusal, Limits()) is refusal
    sentence = str(explain_limits(refusal, Limits(memory=10**8, uplink=10**6)))
    assert "100 MB RAM, 1 MB/s up" in sentence and "barnraise limits --memory auto" in sentence
