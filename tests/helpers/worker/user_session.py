"""Run a command as an ordinary user with a systemd of their own, where only root is at work.

Containers and virtual machines without a login have no `systemd --user`. Linux namespaces give the
command one: it has its own /run, processes and control groups, and is not root there. All of it
ends with the command.
"""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil

SYSTEMD = Path("/usr/lib/systemd/systemd")
USER = 1000
PROBE_SECONDS = 60.0  # for a session in which nothing happens

# Each script runs the rest of its arguments; $0 is its first.
JOIN_GROUP = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
MOUNT_OWN = """
umount -R /sys/fs/cgroup
mount -t cgroup2 none "$0" && mount -t tmpfs none /run || exit
mkdir -p /run/systemd/system "$XDG_RUNTIME_DIR" && exec "$@"
"""  # the folder in /run is what systemd leaves on a machine that it has started
START_SYSTEMD = """
"$0" --user --log-target=null &
tries=0
until systemctl --user show-environment > /dev/null 2>&1; do
    tries=$((tries + 1))
    [ $tries -lt 100 ] && sleep 0.1 || exit
done
"$@"
"""


def run_in_session(command: Sequence[str], seconds: float) -> subprocess.CompletedProcess[str]:
    """Run a command in a session of a user with an empty home.

    Raises:
        OSError: no control group can be created.
        subprocess.TimeoutExpired: it took longer than `seconds`.
    """
    # A folder in memory, as /tmp often is, is no place for a service's state.
    with (
        tempfile.TemporaryDirectory(prefix=".session-", dir=Path.home()) as home,
        _new_control_group() as group,
    ):
        environment = {**os.environ, "HOME": home, "XDG_RUNTIME_DIR": f"/run/user/{USER}"}
        environment.pop("XDG_CONFIG_HOME", None)
        environment.pop("DBUS_SESSION_BUS_ADDRESS", None)
        own = ("--mount", "--cgroup", "--pid", "--fork", "--kill-child", "--mount-proc")
        user = ("--user", f"--map-user={USER}", f"--map-group={USER}")
        return subprocess.run(
            [
                *("sh", "-c", JOIN_GROUP, str(group), "unshare", *own),
                *("sh", "-c", MOUNT_OWN, "/sys/fs/cgroup", "unshare", *user),
                *("sh", "-c", START_SYSTEMD, str(SYSTEMD), *command),
            ],
            env=environment,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )


@functools.cache
def can_start_session() -> bool:
    """Return whether such a session can be started here."""
    if sys.platform != "linux" or os.geteuid() != 0 or not SYSTEMD.exists():
        return False
    try:
        return run_in_session(["true"], PROBE_SECONDS).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


@contextlib.contextmanager
def _new_control_group() -> Iterator[Path]:
    """Create a control group in that of this process, and remove it with all groups in it."""
    mounts = psutil.disk_partitions(all=True)
    root = next((Path(mount.mountpoint) for mount in mounts if mount.fstype == "cgroup2"), None)
    if root is None:
        raise OSError("no tree of control groups, version 2, is mounted")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    own = next(line.removeprefix("0::/") for line in lines if line.startswith("0::/"))
    group = root / own / f"session-{os.getpid()}"
    group.mkdir()
    try:
        yield group
    finally:
        for folder, _, _ in os.walk(group, topdown=False):
            Path(folder).rmdir()
