"""Find out why what a machine fetches from its peers does not come."""

import logging

log = logging.getLogger("barnraise")

STALLED_SECONDS = 15.0  # without bytes of a fetch: nobody sends it
ARRIVAL_BYTES = 32_768  # less is the talk of peers about other things


class FetchMonitor:
    """Finds out why what a machine fetches does not come. Pure: the time is an argument."""

    def __init__(self, description: str) -> None:
        """Watch a fetch. `description` is what is fetched, for people."""
        self._description = description
        self._last_bytes: int | None = None  # of the last arrival
        self._last_arrival = 0.0
        self._is_logged = False

    @property
    def is_stalled(self) -> bool:
        """Return whether nobody sends anything, as of the last call of `describe`."""
        return self._is_logged

    def describe(self, now: float, bytes_received: int, peers: int) -> str:
        """Return what the fetch, with so many bytes and peers, waits for now, in a few words."""
        if self._last_bytes is None or bytes_received - self._last_bytes > ARRIVAL_BYTES:
            self._last_bytes = bytes_received
            self._last_arrival = now
            self._is_logged = False
        if now - self._last_arrival < STALLED_SECONDS:
            return f"fetching {self._description}"
        if not self._is_logged:
            self._is_logged = True
            log.warning(
                "no machine that has %s is online: this machine waits for one",
                self._description,
            )
        if not peers:
            return f"no machine with {self._description} is on"
        return f"{peers} {'peer lacks' if peers == 1 else 'peers lack'} {self._description}, too"
