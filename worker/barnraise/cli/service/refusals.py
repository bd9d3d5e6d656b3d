"""Decide whether a service can be installed on this machine. Pure.

Every refusal names what works instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from barnraise.cli.mounts import Mount

FROM_LOGIN = "start `barnraise join RUN` from your login instead"
# File systems that their drives mount at the start, though no table of mounts names them.
BOOT_FILE_SYSTEMS = ("zfs", "btrfs", "overlay", "9p", "drvfs", "apfs")
REMOVABLE_FOLDERS = ("/media", "/run/media", "/Volumes")


@dataclass(frozen=True)
class ServiceFacts:
    """What decides whether a service can be installed.

    Attributes:
        system: as `sys.platform` names it.
        is_root: whether the command runs as root.
        wants_system: whether a service of the system is wanted.
        has_systemd: whether systemd has started this Linux.
        is_manager_reachable: whether the service manager answers.
        is_container: whether this is a container.
        kernel: the kernel's release.
        home: the mount of the state directory; None if it is not known.
        person_home: the folder where the user's own home is mounted.
        mounted_at_boot: the folders that the system mounts when it starts.
    """

    system: str
    is_root: bool = False
    wants_system: bool = False
    has_systemd: bool = True
    is_manager_reachable: bool = True
    is_container: bool = False
    kernel: str = ""
    home: Mount | None = None
    person_home: str = "/"
    mounted_at_boot: Sequence[str] = ()


def find_refusal(facts: ServiceFacts) -> str:
    """Return why no service can be installed, as a sentence; "" if it can."""
    is_linux, is_windows = facts.system == "linux", facts.system == "win32"
    is_wsl = "microsoft" in facts.kernel.lower()
    has_no_systemd = is_linux and not facts.has_systemd
    home = facts.home
    refusals = {
        "--system is for Linux: leave it out": facts.wants_system and not is_linux,
        f"barnraise knows no service manager of {facts.system}: {FROM_LOGIN}": (
            facts.system not in ("linux", "darwin", "win32")
        ),
        f"this container has no systemd: {FROM_LOGIN}, or let the container's own command be "
        "`barnraise join RUN`": has_no_systemd and facts.is_container,
        f"this Windows Subsystem for Linux has no systemd: {FROM_LOGIN}, or, in its version 2, "
        "enable systemd in /etc/wsl.conf": has_no_systemd and is_wsl,
        f"systemd does not run on this machine: {FROM_LOGIN}": has_no_systemd,
        "a service of root would train with root's rights: run this as your own user"
        + (", or install a service of the system with --system" if is_linux else ""): (
            facts.is_root and not facts.wants_system
        ),
        "--system installs for all users, which only root may: use sudo, or leave it out": (
            facts.wants_system and not facts.is_root
        ),
        "your user's systemd does not answer: log in as this user, on the desktop or by ssh, and "
        f"not with su or sudo; or {FROM_LOGIN}": not facts.is_manager_reachable,
        f"{home.point if home else ''}, where this machine's state is, may not be mounted when the "
        "service starts: name a home on a drive that always is with --home FOLDER"
        + ("" if is_windows else ", or add the drive to /etc/fstab"): (
            home is not None and not _is_mounted_at_boot(home, facts)
        ),
    }
    return next((sentence for sentence, applies in refusals.items() if applies), "")


def _is_mounted_at_boot(home: Mount, facts: ServiceFacts) -> bool:
    if facts.system == "win32":
        return not {"removable", "remote", "cdrom"} & set(home.options.split(","))
    if home.point in ("/", facts.person_home) or home.point in facts.mounted_at_boot:
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
