"""Give the memory of a paused worker back to the system, as far as the process can."""

import ctypes
import gc
import logging
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from barnraise.planning.hardware import return_freed_memory

log = logging.getLogger("barnraise")

MAPS_FILE = Path("/proc/self/smaps")
DONT_NEED = 4  # MADV_DONTNEED
# "7f2a1000-7f2a9000 r-xp 00001000 08:01 1234 /usr/lib/libtorch_cpu.so"
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) ([-r])([-w])[-x]([ps]) [0-9a-f]+ \S+ (\d+)")
# Of a mapping whose pages are all as they are in its file.
_CLEAN = ("Private_Dirty", "Shared_Dirty", "Anonymous", "Swap")


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
        except OSError as error:  # some containers hide the file
            log.debug("the libraries' pages stay: %s", error)
    elif sys.platform == "win32":
        # The type checker runs on other systems, whose ctypes have no windll.
        libraries: Any = ctypes.windll  # pyright: ignore[reportAttributeAccessIssue]
        libraries.psapi.EmptyWorkingSet(libraries.kernel32.GetCurrentProcess())


def _drop_clean_pages() -> None:
    """Unmap pages that the system can read again from their files."""
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end in clean_mappings(MAPS_FILE.read_text()):
        libc.madvise(begin, end - begin, DONT_NEED)


def clean_mappings(text: str) -> Iterator[tuple[int, int]]:
    """Yield the address ranges, in /proc/self/smaps, whose pages may be dropped. Pure.

    Those are mappings of files that cannot be written to and never were: a library's relocated
    data is not writable either, but no file has it.
    """
    place: tuple[int, int] | None = None
    for line in text.splitlines():
        if header := _MAPPING.match(line):
            if place is not None:
                yield place
            begin, end, _, writable, _, inode = header.groups()
            is_library = writable == "-" and inode != "0"
            place = (int(begin, 16), int(end, 16)) if is_library else None
        elif place is not None:
            name, _, value = line.partition(":")
            if name in _CLEAN and value.split()[0] != "0":
                place = None
    if place is not None:
        yield place
