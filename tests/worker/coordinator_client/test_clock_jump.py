"""A machine that slept, or whose clock was set, speaks to its site again at once."""

import time
from contextlib import closing

from helpers.worker.fake_coordinator import FakeCoordinator

from barnraise.coordinator_client.client import CoordinatorClient
from barnraise.protocol.coordinator_messages import RunPage
from barnraise.protocol.signing import Identity


def test_request_after_a_jump_of_the_clock_is_signed_with_the_sites_time():
    ahead = [0.0]
    identity, clock = Identity(b"j" * 32), lambda: time.time() + ahead[0]
    with closing(FakeCoordinator()) as site:
        site.routes["GET /runs"] = lambda body: RunPage(runs=[])
        client = CoordinatorClient(site.url, identity, site.identity.key, clock)
        for seconds in (0.0, 3 * 3600.0, -86_400.0, 365 * 86_400.0):
            ahead[0] = seconds
            assert client.fetch_runs() == RunPage(runs=[])
            assert abs(client.now() - time.time()) < 120, "the site's time counts"
        client.close()
