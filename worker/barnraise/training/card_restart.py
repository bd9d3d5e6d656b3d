"""Begin again in a new process when a GPU, or a rank of several, no longer works with this one.

After sleep, a reset or an update of the driver, or a fault of the card, every later call of CUDA in
the process fails, but a new process can use the card. It goes on from the last saved state: nothing
is read from the card. The times of such restarts are in an environment variable of the new process.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

from barnraise.errors import DeviceLostError, RankLostError, list_causes
from barnraise.swap.device import LOST_CARDS, is_device_lost
from barnraise.swap.sharded.torchrun import ONE_RANK, count_ranks

log = logging.getLogger("barnraise")

VARIABLE = "BARNRAISE_CARD_RESTARTS"  # seconds since 1970, separated by commas
RESTARTS = 3  # at most, within the time below
RESTARTS_SECONDS = 3600.0
PAUSE_SECONDS = 10.0  # before a restart: a driver that is reset needs some seconds

LOST_CARD = "the GPU was lost, as after sleep or an update of its driver"

T = TypeVar("T")


def run_with_restarts(
    run: Callable[[], T], should_leave: Callable[[float], bool], clock: Callable[[], float]
) -> T:
    """Run until the end; if the GPU is lost, run this program again in a new process.

    Args:
        run: trains, and closes everything when it raises an error.
        should_leave: waits for so many seconds; returns whether to end instead.
        clock: returns seconds since 1970.

    Raises:
        DeviceLostError: it was lost too often, or in a cluster, or this machine is to leave.
    """
    try:
        return run()
    except Exception as error:
        lost = find_device_loss(error)
        if lost is None or count_ranks() > 1:  # a cluster is `torchrun`'s to start again
            raise
        reason = str(lost).splitlines()[0]
    now = clock()
    restarts = recent_restarts(os.environ, now)
    if len(restarts) >= RESTARTS:
        if not isinstance(lost, RankLostError):
            raise DeviceLostError(
                f"the GPU was lost {RESTARTS + 1} times within an hour ({reason}). What was saved "
                "is whole. Restart the computer, or train with --device cpu"
            )
        log.warning("ranks were lost %d times within an hour: one card trains on", RESTARTS + 1)
        os.environ[ONE_RANK] = "1"
        restarts = []
    cause = "a rank was lost" if isinstance(lost, RankLostError) else LOST_CARD
    log.warning(
        "%s (%s). Training goes on from the last checkpoint in a new process (restart %d of %d "
        "within an hour)",
        cause,
        reason,
        len(restarts) + 1,
        RESTARTS,
    )
    if isinstance(lost, DeviceLostError) and lost.device:  # the others of several go on
        named = {*filter(None, os.environ.get(LOST_CARDS, "").split(",")), lost.device}
        os.environ[LOST_CARDS] = ",".join(sorted(named))
    if should_leave(PAUSE_SECONDS):
        raise DeviceLostError(f"the GPU was lost ({reason}); what was saved is whole")
    restart_process([*restarts, now])


def find_device_loss(error: BaseException) -> BaseException | None:
    """Return the error that says that a GPU is lost, among an error and those that led to it."""
    for one in list_causes(error):
        if isinstance(one, DeviceLostError) or is_device_lost(one):
            return one
    return None


def recent_restarts(environment: Mapping[str, str], now: float) -> list[float]:
    """Return the times of the restarts that count. Pure."""
    times: list[float] = []
    for text in environment.get(VARIABLE, "").split(","):
        try:
            at = float(text)
        except ValueError:
            continue
        if now - RESTARTS_SECONDS < at <= now:
            times.append(at)
    return times


def restart_process(restarts: list[float]) -> NoReturn:
    """Run this program again with the same arguments, in place of this process where possible."""
    os.environ[VARIABLE] = ",".join(f"{at:.0f}" for at in restarts)
    command = [sys.executable, *sys.orig_argv[1:]]
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":  # a new process there does not take the place of the old one
        sys.exit(subprocess.call(command))
    os.execv(sys.executable, command)
