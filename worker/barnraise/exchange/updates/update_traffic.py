"""Measure how many copies of its updates a machine sends, and how much of others' updates. Pure."""


class UpdateTraffic:
    """What an uplink has sent, counted from one update of this machine to the next.

    Updates are sent after they are published: an update counts once the next one follows it.
    """

    def __init__(self, memory: float = 0.75) -> None:
        """Start without a measurement.

        Args:
            memory: Of what was counted, at each update that this machine publishes.
        """
        self._memory = memory
        self._counted_from: float | None = None  # when the last update was published, in seconds
        self._last_size = 0  # its bytes
        self._own_bytes = self._relayed_bytes = 0  # sent since then
        self._published = self._own = self._relayed = self._seconds = 0.0  # fading sums

    def on_published(self, size: int, now: float) -> None:
        """Record that this machine published an update of so many bytes.

        Args:
            size: Bytes of its payloads.
            now: The time in seconds.
        """
        if self._counted_from is not None:
            self._published = self._memory * self._published + self._last_size
            self._own = self._memory * self._own + self._own_bytes
            self._relayed = self._memory * self._relayed + self._relayed_bytes
            self._seconds = self._memory * self._seconds + now - self._counted_from
        self._own_bytes = self._relayed_bytes = 0
        self._counted_from = now
        self._last_size = size

    def on_sent(self, size: int, is_own: bool) -> None:
        """Record that payload bytes of an update were sent, of this machine's own or another's."""
        if is_own:
            self._own_bytes += size
        else:
            self._relayed_bytes += size

    @property
    def copies(self) -> float | None:
        """The copies of each own update that were sent; None if that is not measured yet."""
        return self._own / self._published if self._published else None

    @property
    def relayed_rate(self) -> float:
        """Bytes per second of others' updates that were sent; 0 before that is measured."""
        return self._relayed / self._seconds if self._seconds else 0.0
