"""Test that a machine says why what it fetches does not come."""

from barnraise.training.fetch_monitor import FetchMonitor


def test_fetch_without_bytes_names_the_missing_machine(caplog):
    monitor = FetchMonitor("the text")
    assert monitor.describe(0.0, 0, 0) == "fetching the text"
    assert monitor.describe(10.0, 0, 0) == "fetching the text" and not monitor.is_stalled
    assert monitor.describe(20.0, 0, 0) == "no machine with the text is on"
    assert monitor.describe(21.0, 500, 2) == "2 peers lack the text, too"
    assert len(caplog.records) == 1, "it is logged once"
    assert monitor.is_stalled
    assert "no machine that has the text is online" in caplog.text


def test_fetch_that_advances_slowly_is_no_reason_to_worry(caplog):
    monitor = FetchMonitor("the text")
    for second in range(0, 600, 10):
        assert monitor.describe(float(second), 40_000 * second, 1) == "fetching the text"
    assert not caplog.records
    assert monitor.describe(700.0, 40_000 * 590, 1) == "1 peer lacks the text, too"
    assert monitor.describe(701.0, 40_000 * 700, 1) == "fetching the text"
    assert not monitor.is_stalled
