"""How a run advances, as one machine sees it: its speed, and the course of the loss.

Pure: the time is an argument.
"""

from collections import deque

WINDOW_SECONDS = 180.0  # the run's speed is a mean over so long
MIN_SPAN_SECONDS = 20.0  # updates come in bursts: a shorter time shows no speed
MAX_LOSSES = 64  # values that describe the whole course of the loss


class ProgressHistory:
    """The last minutes of the ledger's tokens, and the losses since this worker's start."""

    def __init__(self) -> None:
        self._tokens: deque[tuple[float, int]] = deque()  # (seconds, tokens of the ledger)
        self._losses: list[float] = []  # means of `_merged` values each
        self._merged = 1
        self._pending: list[float] = []  # fewer than `_merged` values

    def record(self, at: float, ledger_tokens: int, loss: float | None, is_training: bool) -> None:
        """Record what a status shows. A pause does not count as slow training."""
        if not is_training:
            self._tokens.clear()
            return
        self._tokens.append((at, ledger_tokens))
        while at - self._tokens[0][0] > WINDOW_SECONDS:
            self._tokens.popleft()
        if loss is not None:
            self._record_loss(loss)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the speed of the whole run; None while it is not known."""
        if not self._tokens:
            return None
        first_at, first_tokens = self._tokens[0]
        last_at, last_tokens = self._tokens[-1]
        span = last_at - first_at
        if span < MIN_SPAN_SECONDS or last_tokens <= first_tokens:
            return None
        return (last_tokens - first_tokens) / span

    @property
    def losses(self) -> list[float]:
        """Return the course of the loss since this worker's start, at most `MAX_LOSSES` values."""
        return [round(loss, 4) for loss in self._losses]

    def _record_loss(self, loss: float) -> None:
        self._pending.append(loss)
        if len(self._pending) < self._merged:
            return
        self._losses.append(sum(self._pending) / len(self._pending))
        self._pending = []
        if len(self._losses) > MAX_LOSSES:
            pairs = zip(self._losses[::2], self._losses[1::2], strict=False)
            self._losses = [(first + second) / 2 for first, second in pairs]
            self._merged *= 2
