"""Tests of what the relay measurement concludes from the machines' events."""

import json
import sys

import pytest
from helpers.paths import ROOT

sys.path.append(str(ROOT / "benchmarks" / "field"))
sys.path.append(str(ROOT / "benchmarks" / "shared"))

import bench_exchange
from measurements.relaying import FAST, HOME, MACHINES, Log


def write_events(folder, rounds: list[float], late: float, lost: int | None = None) -> Log:
    """Let each machine publish at these times, and receive each update `late` seconds later.

    The update of number `lost` of machine 1 never arrives at machine 2.
    """
    for rank in range(MACHINES):
        (folder / str(rank)).mkdir()
        events = []
        for seq, at in enumerate(rounds, 1):
            events.append({"event": "published", "at": at, "author": f"{rank}", "seq": seq})
            for other in range(MACHINES):
                if other != rank and not (lost == seq and other == 1 and rank == 2):
                    event = {"event": "arrived", "at": at + late, "author": f"{other}", "seq": seq}
                    events.append(event)
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (folder / str(rank) / "events").write_text(lines + '{"event": "pub')  # it was killed
    return Log.read(folder)


def test_log_counts_rounds_and_those_until_the_trees_are_repaired(tmp_path):
    log = write_events(tmp_path, [0.0, 10.0, 20.0, 30.0], late=4.0)
    assert log.rounds_each(0.0, 40.0) == 0.1
    assert log.rounds_until_repaired(5.0) == 1
    assert log.rounds_until_repaired(31.0) is None


def test_update_that_reaches_not_all_is_no_repair(tmp_path):
    log = write_events(tmp_path, [0.0, 10.0, 20.0, 30.0], late=4.0, lost=2)
    assert log.rounds_until_repaired(5.0) == 2


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--only", "relays"], "invalid choice: 'relays' (choose from"),
        (["--only", "relay", "--only", "loss"], "measure it alone"),
    ],
)
def test_part_that_cannot_be_measured_is_refused(options, sentence, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bench_exchange.py", *options])
    with pytest.raises(SystemExit) as end:
        bench_exchange.main()
    assert end.value.code == 2 and sentence in capsys.readouterr().err


def test_scaled_lines_keep_their_ratios():
    assert FAST.up_megabits / HOME.up_megabits == 1000 / 15
