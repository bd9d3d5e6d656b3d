"""Tests of the memory that averaging weights takes besides a plan."""

from dataclasses import replace

from example_hardware import CPU_MACHINE

from barnraise.planning.limits import Limits
from barnraise.planning.mixing_memory import mean_gradient_bytes, mixing_bytes, reserve_memory
from barnraise.spec import Recipe, preset

GPT2 = preset("gpt2-124m")


def test_fewer_bits_take_less_memory():
    sizes = [mixing_bytes(GPT2, Recipe(mixing_bits=bits)) for bits in (32, 16, 8)]
    assert sizes == sorted(sizes, reverse=True)
    assert 20 < sizes[2] / GPT2.parameters < sizes[0] / GPT2.parameters < 41


def test_gradients_that_moments_have_not_absorbed_take_one_copy():
    plain, absorbing = Recipe(), Recipe(mixing_accumulation=4)
    assert mean_gradient_bytes(GPT2, plain) == 0
    size = mean_gradient_bytes(GPT2, absorbing)
    assert 4 < size / GPT2.parameters < 4.5
    assert mixing_bytes(GPT2, absorbing) == mixing_bytes(GPT2, plain) + size


def test_reserved_device_memory_is_missing_from_a_card():
    machine = replace(CPU_MACHINE, device_memory=8 * 10**9, device_memory_free=7 * 10**9)
    smaller, limits = reserve_memory(machine, Limits(device_memory=6 * 10**9), 0, 10**9)
    assert smaller.device_memory == 7e9 and smaller.device_memory_free == 6e9
    assert limits.device_memory == 5e9


def test_reserved_memory_is_missing_from_machine_and_limits():
    machine = replace(CPU_MACHINE, memory=64 * 10**9, memory_available=50 * 10**9)
    smaller, limits = reserve_memory(machine, Limits(memory=20 * 10**9), 5 * 10**9)
    assert (smaller.memory, smaller.memory_available) == (59e9, 45e9)
    assert limits.memory == 15 * 10**9
    unknown, unlimited = reserve_memory(replace(machine, memory_available=0), Limits(), 10**12)
    assert unknown.memory == 0 == unknown.memory_available
    assert unlimited.memory is None
