"""Let a command leave on Ctrl-C, SIGTERM, a closed terminal and the end of a session.

The first signal asks the command to leave; a second Ctrl-C, or a time limit, ends the process at
once. That loses no more than a power failure: what is published and saved is on the disk.

A thread of its own reacts, because Python runs signal handlers on the main thread only, which may
be in a computation of many seconds.
"""

import contextlib
import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from barnraise.cli.console import errors

if sys.platform != "win32":
    import termios

# Docker kills a container ten seconds after it has told it to stop.
LEAVE_LIMIT_SECONDS = 9.5
# A terminal, a shell and a parent process may each pass on the same key press.
SAME_PRESS_SECONDS = 0.3
INTERRUPTED_CODE = 130  # as shells report a program that Ctrl-C ended

# SIGTERM: `docker stop`, systemd, the end of a session. SIGHUP: the terminal is closed, or the
# connection to it lost. SIGBREAK: Ctrl-Break on Windows.
STOP_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")

# Events of a Windows console: it is closed, the user logs off, the system shuts down.
CONSOLE_ENDINGS = (2, 5, 6)
CONSOLE_WAIT_SECONDS = 60.0  # Windows ends the process before


class StopRequests:
    """Decide what each request to stop means.

    Attributes:
        leaving: is set by the first request.
    """

    def __init__(self, end_process: Callable[[int, str], object]) -> None:
        """Wait for a request; `end_process` gets an exit code and a sentence."""
        self.leaving = threading.Event()
        self._end_process = end_process
        self._first_at = 0.0
        self._lock = threading.Lock()

    def receive(self, number: int, now: float) -> None:
        """React to a signal at `now`, in monotonic seconds.

        Leave, or end at once when Ctrl-C is pressed for the second time.
        """
        with self._lock:
            is_first = not self.leaving.is_set()
            if is_first:
                self._first_at = now
                self.leaving.set()
                self._start_limit()
        if is_first:
            with contextlib.suppress(OSError):  # the terminal is gone
                errors.print("Stopping … (Ctrl-C again to stop at once)")
        elif number == signal.SIGINT and now - self._first_at > SAME_PRESS_SECONDS:
            self._end_process(
                INTERRUPTED_CODE,
                "Stopped at once. What was published and saved before is safe; the unfinished "
                "round is dropped.",
            )

    def receive_console_event(self, event: int, wait: Callable[[float], object]) -> bool:
        """React to an event of a Windows console, in the thread that Windows starts for it.

        Windows ends the process when this returns, and five seconds later in any case.

        Returns:
            Whether the event is one of those that end the process.
        """
        if event not in CONSOLE_ENDINGS:
            return False
        self.receive(signal.SIGTERM, time.monotonic())
        wait(CONSOLE_WAIT_SECONDS)
        return True

    def _start_limit(self) -> None:
        """End the process when leaving takes longer than others wait for it."""
        sentence = (
            f"Leaving took longer than {LEAVE_LIMIT_SECONDS:g} seconds: the unfinished round is "
            "dropped. What was published and saved before is safe."
        )
        timer = threading.Timer(LEAVE_LIMIT_SECONDS, self._end_process, (1, sentence))
        timer.daemon = True
        timer.start()


def stop_on_signals() -> threading.Event:
    """Return an event that the first request to stop sets. Call it on the main thread.

    From then on, leaving takes less than ten seconds: after that the process ends. A second Ctrl-C
    ends it at once. A program that was started with `nohup` goes on when its terminal is closed.
    """
    requests = StopRequests(end_process)
    watched: set[int] = set()
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    _remember_terminals()
    signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for name in STOP_SIGNALS:
        number = getattr(signal, name, None)
        if number is None:
            continue
        if name == "SIGHUP" and signal.getsignal(number) is signal.SIG_IGN:
            continue  # started with nohup
        signal.signal(number, _ignore)
        watched.add(number)

    def watch() -> None:
        with reader, writer:
            while received := reader.recv(64):
                for number in received:
                    if number == getattr(signal, "SIGHUP", None):
                        silence_terminals()
                    if number in watched:
                        requests.receive(number, time.monotonic())

    threading.Thread(target=watch, name="signals", daemon=True).start()
    if sys.platform == "win32":
        _watch_console(requests)
    return requests.leaving


def _ignore(number: int, frame: Any) -> None:
    """Do nothing on the main thread: the thread that reads the wake-up descriptor reacts."""


# ---- the terminal --------------------------------------------------------------------------------

# The standard descriptors that are terminals, with their modes; found before one can be gone.
_terminals: dict[int, list[Any]] = {}


def _remember_terminals() -> None:
    for number in (0, 1, 2):
        if os.isatty(number):
            _terminals[number] = [] if sys.platform == "win32" else termios.tcgetattr(number)


def silence_terminals() -> None:
    """Let nothing more be written to terminals that are gone: each write would be an error."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for number in _terminals:
        with contextlib.suppress(OSError):
            os.dup2(nothing, number)


def _restore_terminals() -> None:
    """Give terminals back the modes and the cursor that a panel has changed."""
    if errors.is_terminal:
        errors.show_cursor()
    for number, modes in _terminals.items():
        if sys.platform != "win32":
            with contextlib.suppress(termios.error):
                termios.tcsetattr(number, termios.TCSANOW, modes)


def end_process(code: int, sentence: str) -> None:
    """End this process at once, with a sentence on stderr, and leave the terminal usable."""
    with contextlib.suppress(OSError):
        _restore_terminals()
        errors.print_sentence(f"\n{sentence}")
    os._exit(code)


def _watch_console(requests: StopRequests) -> None:
    """Receive the events of a Windows console, which Python's signals do not cover."""
    # The type checker runs on other systems, whose ctypes have no WINFUNCTYPE.
    routine_type = ctypes.WINFUNCTYPE(ctypes.c_int, ctypes.c_uint)  # pyright: ignore[reportAttributeAccessIssue]
    routine = routine_type(lambda event: requests.receive_console_event(event, time.sleep))
    _console_routines.append(routine)
    # They have no windll either.
    if not ctypes.windll.kernel32.SetConsoleCtrlHandler(routine, True):  # pyright: ignore[reportAttributeAccessIssue]
        errors.print("Closing this window will not save the unfinished round: press Ctrl-C instead")


_console_routines: list[Any] = []  # Windows calls them as long as the process lives
