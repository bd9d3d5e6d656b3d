"""Two workers, one under hours that end and come back: nothing published is lost."""

import time
from datetime import timedelta
from typing import Any

from udp_ports import free_udp_port
from worker_lab import LONG_RUN, TestedWorker, WorkerLab, published_tokens

from barnraise.planning.limits import Limits
from barnraise.protocol.enums import Activity
from barnraise.training.limits.rule_watch import local_now
from barnraise.training.local_control import LocalPause

ROUND_STEPS = 4
SHORT_PAUSE_SECONDS = 59.0  # no pause of more than a minute, so that the engines stay open


def measure(lab: WorkerLab) -> dict[str, Any]:
    """Let a worker leave and return by its hours; return whether ledgers and digests agree."""
    homes = [lab.create_home("always"), lab.create_home("by-hours")]
    ports = [free_udp_port(), free_udp_port()]
    always, ruled = (
        lab.start(
            home, LONG_RUN, ROUND_STEPS, str(ports[n]), str(ports[1 - n]), homes[1 - n].identity.key
        )
        for n, home in enumerate(homes)
    )
    for worker in (always, ruled):
        worker.wait_until(lambda status: status.updates_sent >= 2, "two updates")
        worker.wait_until(lambda status: status.peers >= 1, "a link")

    # Its hours are over for about a minute.
    opening = local_now() + timedelta(seconds=60)
    homes[1].limits = Limits(hours=f"{opening:%H:%M}-{opening - timedelta(minutes=5):%H:%M}")
    ruled.wait_until(lambda status: status.activity is Activity.PAUSED, "the end of its hours")
    paused = ruled.status
    assert paused is not None and always.status is not None
    received = always.status.updates_received
    ruled.wait_until(lambda status: status.activity is Activity.TRAINING, "its hours")
    always.wait_until(lambda status: status.updates_received > received, "an update after them")

    # Both rest until they have the same updates.
    for worker in (always, ruled):
        worker.control.pause(LocalPause(until=time.time() + SHORT_PAUSE_SECONDS))
    lab.children.wait_until(
        lambda: _has_digest_at_one_vector(always, ruled), "the same updates", SHORT_PAUSE_SECONDS
    )
    digests = {worker.status.anchor for worker in (always, ruled) if worker.status}
    for worker in (ruled, always):
        worker.stop()
    kept = [
        tokens
        for author, tokens in published_tokens(always).items()
        if author.startswith(homes[1].identity.key)
    ]
    return {
        "drill_reason": paused.reason,
        "drill_digests_equal": len(digests) == 1,
        "drill_nothing_lost": sum(kept) >= paused.tokens > 0,
    }


def _has_digest_at_one_vector(first: TestedWorker, second: TestedWorker) -> bool:
    one, other = first.status, second.status
    if one is None or other is None or one.vector != other.vector:
        return False
    is_resting = one.activity is other.activity is Activity.PAUSED
    return is_resting and one.anchor is not None and other.anchor is not None
