"""Two workers, one under hours that end and come back: nothing published is lost."""

from datetime import timedelta
from typing import Any

from udp_ports import free_udp_port
from worker_lab import WorkerLab, published_tokens, saved_digest

from barnraise.planning.limits import Limits
from barnraise.protocol.enums import Activity
from barnraise.training.limits.system_zone import local_now

SETTLE_SECONDS = 15.0  # in which both have the last updates of each other


def measure(lab: WorkerLab) -> dict[str, Any]:
    """Let a worker leave and return by its hours; return whether both ledgers and digests agree."""
    homes = [lab.create_home("always"), lab.create_home("by-hours")]
    ports = [free_udp_port(), free_udp_port()]
    peers = [
        (str(ports[n]), str(ports[1 - n]), homes[1 - n].identity.key) for n in range(len(homes))
    ]
    always, ruled = (
        lab.start(home, 10_000_000, 4, *arguments)
        for home, arguments in zip(homes, peers, strict=True)
    )
    for worker in (always, ruled):
        worker.wait_until(lambda status: status.updates_sent >= 2, "two updates")
        worker.wait_until(lambda status: status.peers >= 1, "a link")
    # The hours are over: they come back within two minutes.
    opening = local_now() + timedelta(seconds=60)
    homes[1].limits = Limits(hours=f"{opening:%H:%M}-{opening - timedelta(minutes=5):%H:%M}")
    ruled.wait_until(lambda status: status.activity is Activity.PAUSED, "the end of its hours")
    reason = ruled.status.reason if ruled.status else ""
    before = always.status.updates_received if always.status else 0
    ruled.wait_until(lambda status: status.activity is Activity.TRAINING, "its hours")
    always.wait_until(lambda status: status.updates_received > before, "an update after its hours")
    for worker in (always, ruled):
        worker.control.pause()
    lab.wait(SETTLE_SECONDS)
    for worker in (always, ruled):
        worker.stop()
    return {
        "drill_reason": reason,
        "drill_ledgers_equal": published_tokens(always) == published_tokens(ruled),
        "drill_digests_equal": saved_digest(always) == saved_digest(ruled),
    }
