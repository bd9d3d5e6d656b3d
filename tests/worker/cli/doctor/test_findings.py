"""Each thing that a machine lacks is one sentence with its remedy."""

from dataclasses import replace

import pytest

from barnraise.cli.doctor.findings import Level, MachineFacts, MirrorFacts, PresetFit, judge_machine
from barnraise.cli.doctor.reach_verdict import NetworkFacts
from barnraise.peering.links.bandwidth_meter import LineRates

GB = 10**9
SITE = MirrorFacts("https://train.example.org", 0.05, clock_seconds=0.4)
GOOD = MachineFacts(
    python=(3, 12, 1),
    version="0.2.0",
    torch="2.9.0",
    device_name="a CPU",
    memory=16 * GB,
    memory_available=9 * GB,
    disk_free=100 * GB,
    home="/home/ada/.barnraise",
    open_files=1024,
    mirrors=(SITE,),
    uplink=2e6,
    presets=(PresetFit("gpt-nano", 900.0), PresetFit("gpt2-124m")),
)


def remarkable(facts: MachineFacts) -> dict[str, tuple[Level, str]]:
    """Return the findings that are not fine."""
    found = judge_machine(facts)
    return {
        f.subject: (f.level, f.sentence) for f in found if f.level not in (Level.OK, Level.UNKNOWN)
    }


def test_machine_that_has_everything_has_no_problem():
    assert remarkable(GOOD) == {}
    sentences = " ".join(finding.sentence for finding in judge_machine(GOOD))
    for part in (
        "Barnraise 0.2.0",
        "PyTorch 2.9.0",
        "answers in 50 ms",
        "up to gpt-nano fit",
        "gpt-nano 900",
        "2 MB",
    ):
        assert part in sentences


@pytest.mark.parametrize(
    ("change", "subject", "level", "remedy"),
    [
        ({"python": (3, 9, 0)}, "Python", Level.PROBLEM, "none of 3.11 to 3.14: `uv python"),
        ({"python": (3, 15, 0)}, "Python", Level.PROBLEM, "uv tool install --python 3.13"),
        ({"torch": "", "torch_error": "no"}, "PyTorch", Level.PROBLEM, "pytorch.org/get-started"),
        ({"device_note": "The driver is too old"}, "GPU", Level.WARNING, "too old."),
        ({"memory_available": GB // 2}, "Memory", Level.WARNING, "close other programs"),
        (
            {"memory": GB // 2, "memory_available": GB // 4},
            "Memory",
            Level.PROBLEM,
            "docker run --memory 2g",
        ),
        ({"disk_free": GB}, "Disk", Level.PROBLEM, "--home"),
        ({"home_error": "Read-only file system"}, "State folder", Level.PROBLEM, "BARNRAISE_HOME"),
        (
            {"home_warning": "It lies on a network drive."},
            "State folder",
            Level.WARNING,
            "network drive",
        ),
        ({"open_files": 64}, "Open files", Level.WARNING, "ulimit -n 4096"),
        ({"mirrors": ()}, "Site", Level.WARNING, "barnraise login URL"),
        (
            {"mirrors": (MirrorFacts("https://a", error="refused"),)},
            "Site",
            Level.PROBLEM,
            "HTTPS_PROXY",
        ),
        (
            {"mirrors": (MirrorFacts("https://a", error="refused"), SITE)},
            "Site",
            Level.WARNING,
            "the others take its place",
        ),
        (
            {"mirrors": (replace(SITE, clock_seconds=-90.0),)},
            "Clock",
            Level.WARNING,
            "90 seconds behind the site's: set it",
        ),
        ({"network": NetworkFacts(has_ipv4=False)}, "Peers", Level.WARNING, "connect it"),
        ({"presets": (PresetFit("gpt-nano"),)}, "Models", Level.PROBLEM, "barnraise limits"),
    ],
)
def test_each_lack_is_one_sentence_with_its_remedy(change, subject, level, remedy):
    found = remarkable(replace(GOOD, **change))
    assert list(found) == [subject]
    assert found[subject][0] is level and remedy in found[subject][1]
    assert found[subject][1].endswith(".")


def test_machine_without_upnp_learns_what_to_do_instead():
    found = {f.subject: f for f in judge_machine(replace(GOOD, has_upnp=False))}
    assert found["Router"].level is Level.OK and "--port PORT" in found["Router"].sentence
    assert "Router" not in {f.subject for f in judge_machine(GOOD)}


def test_gpu_that_others_use_is_named():
    gpu = replace(GOOD, device_name="A card", device_memory=8 * GB)
    assert "close the programs" in remarkable(replace(gpu, device_memory_free=GB))["GPU"][1]
    assert remarkable(replace(gpu, device_memory_free=7 * GB)) == {}


@pytest.mark.parametrize(
    ("tried", "connected", "line", "sentence"),
    [
        (1, 1, LineRates(2e6, 14e6), "sends 2 MB/s to a peer and receives 14 MB/s"),
        (1, 1, LineRates(0.0, 14e6), "too little reached the peer"),
        (1, 1, LineRates(), "not measured with a peer now"),
        (0, 0, LineRates(), "not measured: nobody else is online"),
        (2, 0, LineRates(), "not measured: no peer that the site lists answered"),
    ],
)
def test_line_is_a_sentence_whether_it_was_measured_or_not(tried, connected, line, sentence):
    network = NetworkFacts(
        has_asked_peers=True, peers_tried=tried, peers_connected=connected, line=line
    )
    found = {f.subject: f.sentence for f in judge_machine(replace(GOOD, network=network))}
    assert sentence in found["Line"] and "In its runs the uplink carried 2 MB/s." in found["Line"]
    assert "reach this machine could not be tested" in found["Incoming"]
    quiet = replace(GOOD, uplink=0.0, network=NetworkFacts())
    assert not {"Line", "Incoming"} & {f.subject for f in judge_machine(quiet)}


def test_difference_of_clocks_that_slow_answers_explain_is_no_warning():
    late = MirrorFacts("https://a", 8.2, clock_seconds=12.0)
    for mirror, level in ((late, Level.OK), (replace(late, seconds=0.2), Level.WARNING)):
        found = judge_machine(replace(GOOD, mirrors=(mirror,)))
        assert [finding.level for finding in found if finding.subject == "Clock"] == [level]
