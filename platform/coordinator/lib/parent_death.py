"""End a process when its parent ends, also when the parent is killed.

A killed process cannot end its children, so Linux does it (prctl(2), PR_SET_PDEATHSIG). Elsewhere
nothing happens, and a supervisor ends what an earlier one has left behind.

`python parent_death.py PARENT USER COMMAND…` changes to the system user (unless USER is empty),
asks to end with the process PARENT, and replaces itself by the command.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread that started it ends.

    Args:
        parent: The pid of the process that started this one; if it has ended already, so does this.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def child_command(command: tuple[str, ...], user: str = "") -> tuple[str, ...]:
    """Return the command line of a child that ends with this process.

    Args:
        command: The child's own command line.
        user: The system user that runs it; only root may name one.
    """
    if sys.platform != "linux":
        return command
    # Isolated and without site packages, Python starts in some 10 ms.
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), user, *command)


def _change_user(name: str) -> None:
    import pwd

    entry = pwd.getpwnam(name)
    os.initgroups(name, entry.pw_gid)
    os.setgid(entry.pw_gid)
    os.setuid(entry.pw_uid)


if __name__ == "__main__":
    if sys.argv[2]:
        _change_user(sys.argv[2])  # which would cancel the request to end with the parent
    end_with_parent(int(sys.argv[1]))
    for ignored in (signal.SIGPIPE, signal.SIGXFSZ):  # by Python, and the command would inherit it
        signal.signal(ignored, signal.SIG_DFL)
    os.execvp(sys.argv[3], sys.argv[3:])
