"""What a plan may use of a machine."""

from dataclasses import replace

import pytest
from example_hardware import cpu_machine
from hypothesis import given
from hypothesis import strategies as st

from barnraise.planning.budgets import (
    CONTEXT_BYTES,
    FREE_RESERVE,
    FREE_RESERVE_BYTES,
    WORKSPACE_BYTES,
    compute_budgets,
    daily_write_limit,
    device_limit,
    extend_to_limits,
)
from barnraise.planning.limits import UNLIMITED, Limits

GB = 10**9
CPU = cpu_machine(memory=16 * GB, disk=100 * GB, disk_size=1000 * GB)
GPU = replace(CPU, device="cuda", device_memory=8 * GB, device_memory_free=6 * GB)


def test_budget_of_a_gpu_is_what_is_free_less_workspaces_and_margin():
    budgets = compute_budgets(GPU, Limits())
    assert budgets.device_memory == int(6 * GB * 0.97) - WORKSPACE_BYTES
    assert budgets.device_memory + budgets.device_overhead == 6 * GB
    unmeasured = compute_budgets(replace(GPU, device_memory_free=0), Limits())
    assert unmeasured.device_memory == int((8 * GB - CONTEXT_BYTES) * 0.97) - WORKSPACE_BYTES


def test_limit_on_a_gpu_includes_what_cuda_allocates_there():
    budgets = compute_budgets(GPU, Limits(device_memory=4 * GB))
    assert budgets.device_memory == int((4 * GB - CONTEXT_BYTES) * 0.97) - WORKSPACE_BYTES
    assert budgets.device_memory + budgets.device_overhead == 4 * GB
    more_than_free = compute_budgets(GPU, Limits(device_memory=7 * GB))
    assert more_than_free.device_memory == compute_budgets(GPU, Limits()).device_memory
    assert compute_budgets(GPU, Limits(device_memory=10**6)).device_memory == 0


@given(used=st.integers(0, 5 * GB))
def test_plan_of_so_many_bytes_fits_its_device_limit_closely(used):
    budget = compute_budgets(GPU, Limits(device_memory=device_limit(used))).device_memory
    assert budget is not None and used - 2 <= budget <= used + 2


def test_machine_without_gpu_computes_in_a_window_of_exactly_the_limit():
    assert compute_budgets(CPU, Limits()).device_memory is None
    budgets = compute_budgets(CPU, Limits(device_memory=GB))
    assert (budgets.device_memory, budgets.device_overhead) == (GB, 0)


def test_process_with_cuda_leaves_itself_more_memory():
    cpu, gpu = compute_budgets(CPU, Limits()), compute_budgets(GPU, Limits())
    assert cpu.memory == int(16 * GB * 0.85) and gpu.memory == cpu.memory - 1_500_000_000
    assert compute_budgets(GPU, Limits(memory=2 * GB)).memory == 2 * GB
    assert compute_budgets(replace(GPU, memory=GB), Limits()).memory == 0


def test_drive_may_be_written_to_a_third_a_day_unless_its_owner_decides():
    assert compute_budgets(CPU, Limits()).disk_writes_per_day == 300 * GB
    assert compute_budgets(replace(CPU, disk_size=0), Limits()).disk_writes_per_day == 30 * GB
    assert daily_write_limit(GB, Limits(disk_writes_per_day=5 * GB)) == 5 * GB
    assert daily_write_limit(GB, Limits(disk_writes_per_day=UNLIMITED)) is None


@pytest.mark.parametrize("free", [0, 6 * GB])
@given(device_memory=st.integers(1, 200 * GB), memory=st.integers(1, 200 * GB))
def test_extended_machine_has_what_the_limits_name(free, device_memory, memory):
    limits = Limits(memory=memory, device_memory=device_memory, disk=400 * GB)
    extended = extend_to_limits(replace(GPU, device_memory_free=free), limits)
    budgets = compute_budgets(extended, limits)
    assert budgets.device_memory + budgets.device_overhead == device_memory
    assert budgets.memory == memory and budgets.disk == 400 * GB <= extended.disk
    assert extended.device_memory >= GPU.device_memory


def test_plan_uses_only_memory_that_other_programs_leave():
    busy = replace(CPU, memory_available=6 * GB)
    assert compute_budgets(busy, Limits()).memory == int(6 * GB - FREE_RESERVE * 16 * GB)
    idle = replace(CPU, memory_available=15 * GB + GB // 2)
    assert compute_budgets(idle, Limits()).memory == compute_budgets(CPU, Limits()).memory
    small = replace(CPU, memory=GB, memory_available=GB // 2)
    assert compute_budgets(small, Limits()).memory == GB // 2 - FREE_RESERVE_BYTES
    assert compute_budgets(replace(CPU, memory_available=1), Limits()).memory == 0


def test_limit_above_the_available_memory_is_lowered_to_it():
    busy = replace(CPU, memory_available=6 * GB)
    assert compute_budgets(busy, Limits(memory=4 * GB)).memory == 4 * GB
    assert compute_budgets(busy, Limits(memory=9 * GB)).memory == 6 * GB - FREE_RESERVE_BYTES
    extended = extend_to_limits(busy, Limits(memory=64 * GB))
    assert compute_budgets(extended, Limits(memory=64 * GB)).memory == 64 * GB
