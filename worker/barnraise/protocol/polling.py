"""How often a wait looks again where nothing wakes it."""

LOOP_POLL_SECONDS = 0.1  # a loop that serves peers while it waits
PERSON_POLL_SECONDS = 0.2  # what somebody at the machine does or waits for: it must feel immediate
NETWORK_POLL_SECONDS = 1.0  # what another machine does: each look costs it a request
