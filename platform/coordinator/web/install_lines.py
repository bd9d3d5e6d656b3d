"""The commands that install the worker, for each system and kind of hardware. Pure.

PyTorch publishes a build for each kind of hardware, and the default one differs by system: for
NVIDIA GPUs on Linux, for CPUs on Windows and macOS. uv chooses the build for the driver that it
finds; pip and pipx need the address of the others. The constraints name the tested versions.
"""

from dataclasses import dataclass

TORCH_BUILDS = "https://download.pytorch.org/whl"
CUDA_INDEX = f"{TORCH_BUILDS}/cu130"
CPU_INDEX = f"{TORCH_BUILDS}/cpu"
PYTHON = (
    "3.13"  # for which each package has a wheel on each system; uv downloads it where it is missing
)
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
# What the command downloads, without Python itself (November 2026).
SIZES = {
    ("linux", "cpu"): "250 MB",
    ("linux", "nvidia"): "2.8 GB",
    ("linux", "amd"): "several GB",
    ("windows", "cpu"): "170 MB",
    ("windows", "nvidia"): "several GB",
    ("macos", "cpu"): "150 MB",
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
    size: str  # of what it downloads; "" without a command


def install_choices(wheel_url: str, constraints_url: str, sha256: str) -> list[InstallChoice]:
    """List all choices. The installer compares the wheel with its SHA-256 digest."""
    url = f"{wheel_url}#sha256={sha256}"
    return [
        _build_choice(system, hardware, url, constraints_url)
        for system in SYSTEMS
        for hardware in HARDWARE
    ]


def _build_choice(system: str, hardware: str, wheel: str, constraints: str) -> InstallChoice:
    note = NOTES.get((system, hardware), "")
    if (system, hardware) not in BUILDS:
        return InstallChoice(system, hardware, "", "", note, "")
    backend, index = BUILDS[system, hardware]
    build = f"--torch-backend={backend} " if backend else ""
    uv = f"uv tool install --python {PYTHON} {build}--constraints {constraints} {wheel}"
    options = f"--constraint {constraints}" + (f" --extra-index-url {index}" if index else "")
    pipx = "" if index is None else f'pipx install --pip-args="{options}" {wheel}'
    return InstallChoice(system, hardware, uv, pipx, note, SIZES[system, hardware])


def detect_system(user_agent: str) -> str:
    """Return the system of a browser, a key of `SYSTEMS`; phones count as Linux."""
    if "Windows" in user_agent:
        return "windows"
    if "Mac OS X" in user_agent and "Mobile" not in user_agent:
        return "macos"
    return "linux"
