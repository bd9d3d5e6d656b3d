"""A network for the exchange's benchmark without namespaces: addresses of this machine."""

from barnraise.planning.lines import Line


class LoopbackNetwork:
    """Addresses of this machine, without lines."""

    device = "lo"

    def __init__(self, count: int) -> None:
        """Provide addresses for so many workers."""
        self.count = count

    def host(self, n: int) -> str:
        """Return the address of worker `n`."""
        return f"127.0.0.{10 + n}"

    def command_prefix(self, n: int) -> list[str]:
        """Return the command that runs other commands at worker `n`: none."""
        return []

    def shape(self, line: Line | None) -> None:
        """Limit nothing."""

    def bytes_sent(self) -> list[int]:
        """Return zeros: nothing is counted."""
        return [0] * self.count

    def relay_seconds(self) -> float:
        """Return zero: nothing is delayed."""
        return 0.0
