"""Give the memory of a paused worker back to the system, as far as the process can."""

import ctypes
import gc
import logging
import sys
from typing import Any

import psutil

from barnraise.planning.hardware import return_freed_memory

log = logging.getLogger("barnraise")

DONT_NEED = 4  # MADV_DONTNEED


def return_memory() -> None:
    """Return what nothing refers to, and the pages of libraries that nothing runs now.

    Torch's libraries alone occupy 150 MB of a process that computes nothing. Their pages come back
    from the disk's cache when they are needed again.
    """
    gc.collect()
    return_freed_memory()
    if sys.platform == "linux":
        try:
            _drop_clean_pages()
        except (OSError, psutil.Error) as error:  # some containers hide the file
            log.debug("the libraries' pages stay: %s", error)
    elif sys.platform == "win32":
        # The type checker runs on other systems, whose ctypes have no windll.
        libraries: Any = ctypes.windll  # pyright: ignore[reportAttributeAccessIssue]
        libraries.psapi.EmptyWorkingSet(libraries.kernel32.GetCurrentProcess())


def _drop_clean_pages() -> None:
    """Unmap pages that the system can read again from their files.

    Those are of files that cannot be written to and never were: a library's relocated data is not
    writable either, but no file has it.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for part in psutil.Process().memory_maps(grouped=False):
        is_changed = part.private_dirty or part.shared_dirty or part.anonymous or part.swap
        if part.path.startswith("/") and "w" not in part.perms and not is_changed:
            begin, end = (int(address, 16) for address in part.addr.split("-"))
            libc.madvise(begin, end - begin, DONT_NEED)
