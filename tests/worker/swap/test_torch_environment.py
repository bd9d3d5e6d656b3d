"""The environment is prepared for torch, and the user's own settings stay."""

import pytest

from barnraise.swap import torch_environment
from barnraise.swap.torch_environment import ALLOCATOR_NAMES, configure_torch_environment


@pytest.mark.parametrize(
    ("version", "names"), [((2, 13), ALLOCATOR_NAMES[:1]), ((2, 6), ALLOCATOR_NAMES[1:])]
)
def test_allocator_is_configured_by_the_names_that_torch_reads(monkeypatch, version, names):
    monkeypatch.setattr(torch_environment, "_torch_version", lambda: version)
    environment: dict[str, str] = {}
    configure_torch_environment(environment, "linux")
    set_names = [name for name in ALLOCATOR_NAMES if name in environment]
    assert set_names == list(names) and environment[names[0]] == "expandable_segments:True"


def test_settings_of_the_user_and_other_systems_stay():
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "garbage_collection_threshold:0.8",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL": "0",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
    }
    before = dict(environment)
    configure_torch_environment(environment, "linux")
    assert environment == before
    environment = {}
    configure_torch_environment(environment, "win32")
    assert set(environment) == {
        "CUBLAS_WORKSPACE_CONFIG",
        "TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL",
    }
