"""Decide whether a service can be installed on this machine. Pure.

Every refusal names what works instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from barnraise.cli.mounts import Mount

# File systems that their drives mount at the start, though no table of mounts names them.
BOOT_FILE_SYSTEMS = ("zfs", "btrfs", "overlay", "9p", "drvfs", "apfs")
REMOVABLE_FOLDERS = ("/media", "/run/media", "/Volumes")


@dataclass(frozen=True)
class ServiceFacts:
    """What decides whether a service can be installed."""

    system: str  # as `sys.platform` names it
    is_root: bool = False
    wants_system: bool = False  # whether a service of the system is wanted
    has_systemd: bool = True  # whether it has started this Linux
    is_manager_reachable: bool = True  # whether the service manager answers
    home: Mount | None = None  # of the state directory; None if it is not known
    boot_mounts: Sequence[str] = ("/",)  # the folders that the system mounts when it starts


def find_refusal(facts: ServiceFacts) -> str:
    """Return why no service can be installed, as a sentence; "" if it can."""
    if facts.system not in ("darwin", "win32") and not facts.has_systemd:
        return (
            "systemd does not run here: start `barnraise join RUN` from your login instead (in a "
            "container as its own command; WSL 2 runs systemd if /etc/wsl.conf says so)"
        )
    if facts.wants_system and facts.system in ("darwin", "win32"):
        return "--system is for Linux: leave it out"
    if facts.wants_system and not facts.is_root:
        return "--system installs for the whole machine, which only root may: use sudo"
    if facts.is_root and not facts.wants_system:
        return (
            "a service of root would train with root's rights: run this as your own user, or, on "
            "Linux, with --system, which trains as the user who owns the home"
        )
    if not facts.is_manager_reachable:
        return (
            "your user's systemd does not answer: log in as this user, on the desktop or by ssh, "
            "and not with su or sudo"
        )
    if facts.home is not None and not _is_mounted_at_boot(facts.home, facts):
        return (
            f"{facts.home.point}, where this machine's state is, may not be mounted when the "
            "service starts: name a home on a drive that always is with --home FOLDER"
        )
    return ""


def _is_mounted_at_boot(home: Mount, facts: ServiceFacts) -> bool:
    if facts.system == "win32":
        return not {"removable", "remote", "cdrom"} & set(home.options.split(","))
    if home.point in facts.boot_mounts:
        return True
    if any(home.point.startswith(f"{folder}/") for folder in REMOVABLE_FOLDERS):
        return False
    return home.kind in BOOT_FILE_SYSTEMS


def read_boot_mounts(table: str) -> list[str]:
    r"""Return the folders that /etc/fstab mounts at the start; `\040` in it is a space."""
    points = []
    for line in table.splitlines():
        fields = line.split("#", 1)[0].split()
        if len(fields) >= 4 and "noauto" not in fields[3].split(","):
            points.append(fields[1].replace("\\040", " "))
    return points
