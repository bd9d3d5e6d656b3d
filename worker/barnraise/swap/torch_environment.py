"""Set the environment variables that torch reads when it is imported.

Torch is not imported here.
"""

import os
import sys
from collections.abc import MutableMapping
from importlib.metadata import PackageNotFoundError, version

# Grow the allocator's segments in place, so that tensors of many sizes leave few gaps. Windows has
# no such segments.
ALLOCATOR_SETTINGS = "expandable_segments:True"
ALLOCATOR_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
FIRST_WITH_ONE_NAME = (2, 9)  # the version of torch that reads the first name, on every GPU
# Without a fixed number of workspaces torch refuses to call cuBLAS in deterministic mode.
CUBLAS_WORKSPACES = "CUBLAS_WORKSPACE_CONFIG"
EIGHT_WORKSPACES = ":4096:8"  # of 4 MiB
# On AMD's consumer GPUs ROCm's fused attention counts as experimental. Without it, attention holds
# all scores of a sequence at once, which no plan counts.
ROCM_FUSED_ATTENTION = "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL"


def configure_torch_environment(
    environment: MutableMapping[str, str] = os.environ, system: str = sys.platform
) -> None:
    """Set the variables that the user has not set."""
    environment.setdefault(ROCM_FUSED_ATTENTION, "1")
    environment.setdefault(CUBLAS_WORKSPACES, EIGHT_WORKSPACES)
    if system == "linux" and not any(name in environment for name in ALLOCATOR_NAMES):
        has_one_name = _torch_version() >= FIRST_WITH_ONE_NAME
        for name in ALLOCATOR_NAMES[:1] if has_one_name else ALLOCATOR_NAMES[1:]:
            environment[name] = ALLOCATOR_SETTINGS


def _torch_version() -> tuple[int, int]:
    """Return the first two numbers of torch's version, (0, 0) if it is not installed."""
    try:
        major, minor, *_ = version("torch").split(".")
    except PackageNotFoundError:
        return 0, 0
    return int(major), int(minor)
