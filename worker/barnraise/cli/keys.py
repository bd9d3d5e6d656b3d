"""Read single keys from the terminal, without Enter, in a thread of its own."""

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from barnraise.protocol.polling import PERSON_POLL_SECONDS


@contextlib.contextmanager
def read_keys(on_key: Callable[[str], None]) -> Iterator[bool]:
    """Call `on_key` for each key that is pressed while the block runs; restore the terminal after.

    Args:
        on_key: receives the key as it was typed, in another thread.

    Yields:
        Whether keys can be read: standard input is a terminal that this process may read.
    """
    ended = threading.Event()
    with contextlib.ExitStack() as stack:
        if not sys.stdin or not sys.stdin.isatty():
            yield False
            return
        if sys.platform == "win32":
            read_key: Callable[[], str] = _read_console_key
        else:
            terminal = stack.enter_context(_UnbufferedTerminal(sys.stdin.fileno()))
            read_key = terminal.read_key

        def watch() -> None:
            while not ended.is_set():
                key = read_key()
                if key:
                    on_key(key)
                else:
                    ended.wait(PERSON_POLL_SECONDS)

        thread = threading.Thread(target=watch, name="keys", daemon=True)
        thread.start()
        stack.callback(thread.join, 2 * PERSON_POLL_SECONDS)
        stack.callback(ended.set)
        yield True


def _read_console_key() -> str:
    """Return a key that was pressed in Windows' console; "" if none was."""
    console: Any = importlib.import_module("msvcrt")
    return console.getwch() if console.kbhit() else ""


class _UnbufferedTerminal:
    """A terminal of Linux or macOS that passes each key on at once, and does not show it.

    Ctrl-C and Ctrl-Z work as ever. A process in the background leaves the terminal alone: it
    belongs to another one.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._termios: Any = importlib.import_module("termios")
        self._original: list[Any] = self._termios.tcgetattr(descriptor)

    def __enter__(self) -> "_UnbufferedTerminal":
        if self._is_foreground():
            self._disable_line_mode()
        return self

    def __exit__(self, *failure: object) -> None:
        if self._is_foreground():
            self._termios.tcsetattr(self._descriptor, self._termios.TCSADRAIN, self._original)

    def read_key(self) -> str:
        """Return a key that was pressed; "" if none was within a moment."""
        import select

        if not self._is_foreground():
            return ""
        self._disable_line_mode()  # a shell sets it again when the process was suspended
        ready, _, _ = select.select([self._descriptor], [], [], PERSON_POLL_SECONDS)
        if not ready:
            return ""
        try:
            return os.read(self._descriptor, 1).decode(errors="replace")
        except OSError:
            return ""  # the terminal was closed

    def _is_foreground(self) -> bool:
        try:
            return os.tcgetpgrp(self._descriptor) == os.getpgrp()
        except OSError:
            return False

    def _disable_line_mode(self) -> None:
        termios = self._termios
        with contextlib.suppress(termios.error, OSError):
            attributes = termios.tcgetattr(self._descriptor)
            if attributes[3] & (termios.ICANON | termios.ECHO):
                attributes[3] &= ~(termios.ICANON | termios.ECHO)
                termios.tcsetattr(self._descriptor, termios.TCSADRAIN, attributes)
