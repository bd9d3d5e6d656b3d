"""The commands that install the worker, for each system and kind of hardware. Pure.

PyTorch publishes a build for each kind of hardware, and the default one differs by system: for
NVIDIA GPUs on Linux, for CPUs on Windows and macOS. uv chooses the build for the driver that it
finds; pip and pipx need the address of the others.
"""

from dataclasses import dataclass

TORCH_BUILDS = "https://download.pytorch.org/whl"
CUDA_INDEX = f"{TORCH_BUILDS}/cu130"
CPU_INDEX = f"{TORCH_BUILDS}/cpu"
SYSTEMS = {"windows": "Windows", "macos": "macOS", "linux": "Linux"}
HARDWARE = {"cpu": "CPU", "nvidia": "NVIDIA GPU", "amd": "AMD GPU"}
# System and hardware → what uv's option is, and the index that pipx needs as well; "" for none.
BUILDS = {
    ("linux", "cpu"): ("cpu", CPU_INDEX),
    ("linux", "nvidia"): ("auto", ""),
    ("linux", "amd"): ("auto", None),
    ("windows", "cpu"): ("cpu", ""),
    ("windows", "nvidia"): ("auto", CUDA_INDEX),
    ("macos", "cpu"): ("", ""),
}
NOTES = {
    ("linux", "nvidia"): "GTX 16xx, RTX 20xx or newer, with driver 580 or newer.",
    ("windows", "nvidia"): "GTX 16xx, RTX 20xx or newer, with driver 580 or newer.",
    ("linux", "amd"): "Cards that ROCm supports; uv finds the build for yours.",
    ("windows", "amd"): "There is no PyTorch build for AMD GPUs on Windows: install for the CPU.",
    ("macos", "nvidia"): "No Mac has an NVIDIA GPU that PyTorch can use: install for the CPU.",
    ("macos", "amd"): "PyTorch uses no AMD GPU on a Mac: install for the CPU.",
    ("macos", "cpu"): "For Macs with Apple silicon; their GPU is not used yet.",
}
UNSUPPORTED = (
    "No packages exist for Macs with an Intel processor, Windows on ARM, 32-bit systems, and Linux "
    "without glibc (Alpine)."
)


@dataclass(frozen=True)
class InstallChoice:
    """How to install the worker on one system with one kind of hardware."""

    system: str  # a key of `SYSTEMS`
    hardware: str  # a key of `HARDWARE`
    uv: str  # the command for uv; "" where PyTorch has no build
    pipx: str  # the command for pipx; "" where it cannot choose the build
    note: str  # what to know, or ""


def install_choices(wheel_url: str, sha256: str) -> list[InstallChoice]:
    """List all choices. The installer compares the wheel with its SHA-256 digest."""
    url = f"{wheel_url}#sha256={sha256}"
    return [_build_choice(system, hardware, url) for system in SYSTEMS for hardware in HARDWARE]


def _build_choice(system: str, hardware: str, wheel_url: str) -> InstallChoice:
    note = NOTES.get((system, hardware), "")
    if (system, hardware) not in BUILDS:
        return InstallChoice(system, hardware, "", "", note)
    backend, index = BUILDS[system, hardware]
    uv = f"uv tool install {f'--torch-backend={backend} ' if backend else ''}{wheel_url}"
    pipx = f"pipx install {wheel_url}"
    if index:
        pipx = f'pipx install --pip-args="--extra-index-url {index}" {wheel_url}'
    return InstallChoice(system, hardware, uv, "" if index is None else pipx, note)


def detect_system(user_agent: str) -> str:
    """Return the system of a browser, a key of `SYSTEMS`; phones count as Linux."""
    if "Windows" in user_agent:
        return "windows"
    if "Mac OS X" in user_agent and "Mobile" not in user_agent:
        return "macos"
    return "linux"
