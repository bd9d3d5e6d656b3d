"""A worker trains on while other programs take memory of its card, as the driver reports it.

`CardDriver` stands for CUDA and torch's allocator; all else is the worker's own code.
"""

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from example_hardware import cpu_machine

from barnraise.errors import MemoryShortageError
from barnraise.planning.limits import Limits
from barnraise.planning.memory_pressure import ATTEMPTS
from barnraise.planning.plan import Plan
from barnraise.planning.search import make_plan
from barnraise.spec import Recipe, preset
from barnraise.swap.device import free_memory
from barnraise.swap.executor import naming_failures
from barnraise.training.card_memory import claim_card_memory
from barnraise.training.memory_retry import run_within_memory
from barnraise.training.memory_watch import MemoryWatch

GB = 10**9
MB = 10**6
MODEL = preset("gpt2-355m")
PC = cpu_machine(
    device="cuda",
    dtype="bfloat16",
    memory=64 * GB,
    disk=500 * GB,
    device_memory=8 * GB,
    matmul=((768, 4e13),),
    attention=2e13,
    elementwise=2e11,
    launches=150_000.0,
)


class CardDriver:
    """The driver of a card of 8 GB, which pages what exceeds it, and torch's allocator on it.

    Attributes:
        others: bytes that other programs hold.
        paged: bytes that torch was given beyond the card, without an error.
    """

    total = 8 * GB

    def __init__(self) -> None:
        self.others = 1 * GB
        self.held = self.paged = 0
        self.bound = self.total

    def mem_get_info(self, device: str) -> tuple[int, int]:
        """Return what is free now and in all."""
        return max(0, self.total - self.others - self.held), self.total

    def set_fraction(self, fraction: float, index: int) -> None:
        """Bind torch's allocator to a fraction of the card."""
        self.bound = int(fraction * self.total)

    def allocate(self, size: int) -> None:
        """Take memory as torch does: beyond its bound it raises, and the driver never does."""
        if self.held + size > self.bound:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size >> 20} MiB.")
        self.paged += max(0, size - self.mem_get_info("cuda")[0])
        self.held += size


@pytest.fixture
def driver(monkeypatch) -> CardDriver:
    """Provide the driver behind torch's functions."""
    driver = CardDriver()
    functions = {
        "mem_get_info": driver.mem_get_info,
        "set_per_process_memory_fraction": driver.set_fraction,
        "get_device_properties": lambda device: SimpleNamespace(total_memory=driver.total),
        "current_device": lambda: 0,
        "empty_cache": lambda: None,
    }
    for name, function in functions.items():
        monkeypatch.setattr(torch.cuda, name, function)
    return driver


class CardTrainer:
    """A trainer that plans, claims and allocates, while another program takes memory.

    Attributes:
        left: what another program leaves of each plan's bytes before they are claimed.
        leak: bytes beyond the plan that the first attempt allocates.
        plans: of all attempts.
    """

    def __init__(self, driver: CardDriver, left: list[float], leak: int = 0) -> None:
        self.driver, self.left, self.leak = driver, left, leak
        self.plans: list[Plan] = []
        self.messages: list[str] = []

    def create(self, limits: Limits) -> "CardTrainer":
        """Plan for what is free now."""
        self.driver.held = 0
        machine = replace(PC, device_memory_free=free_memory("cuda"))
        self.plan = make_plan(machine, MODEL, limits, 16)
        self.plans.append(self.plan)
        return self

    def run(self) -> None:
        """Take the plan's memory and train."""
        if self.left:
            self.driver.others = self.driver.total - int(self.left.pop(0) * self.plan.device_bytes)
        try:
            claim_card_memory(self.plan, Recipe())
            with naming_failures("the forward of block.1 failed"):
                self.driver.allocate(self.plan.device_bytes)
                leak, self.leak = self.leak, 0
                self.driver.allocate(leak)
        except MemoryShortageError as error:
            self.messages.append(str(error))
            raise

    def train(self) -> "CardTrainer | None":
        """Train within memory."""
        return run_within_memory(self.create, Limits(), MemoryWatch())


def test_memory_taken_between_plan_and_claim_costs_what_was_taken(driver):
    trainer = CardTrainer(driver, [0.95])
    assert trainer.train() is trainer
    first, second = trainer.plans
    (message,) = trainer.messages
    assert re.search(r"has [\d.]+ GB of memory free, and the plan takes [\d.]+ GB", message)
    assert second.device_bytes <= 0.94 * first.device_bytes
    assert second.tokens_per_second > 0.8 * first.tokens_per_second
    assert driver.paged == 0


def test_step_that_needs_more_than_its_plan_raises_and_pages_nothing(driver):
    trainer = CardTrainer(driver, [], leak=800 * MB)
    assert trainer.train() is trainer
    first, second = trainer.plans
    assert "not as much GPU memory left as it needs" in trainer.messages[0]
    assert second.device_bytes <= 0.95 * first.device_bytes
    assert second.tokens_per_second > 0.9 * first.tokens_per_second
    assert driver.paged == 0


def test_torch_is_not_given_more_than_is_free_when_it_begins(driver):
    trainer = CardTrainer(driver, [1.01], leak=200 * MB)
    assert trainer.train() is trainer
    assert len(trainer.plans) == 2 and driver.paged == 0, "the reserve was no longer there"


def test_program_that_takes_more_each_time_ends_the_worker(driver):
    trainer = CardTrainer(driver, [0.95] * (ATTEMPTS + 2))
    with pytest.raises(MemoryShortageError, match="another program has taken memory"):
        trainer.train()
    sizes = [plan.device_bytes for plan in trainer.plans]
    assert len(sizes) == ATTEMPTS + 1 and sizes == sorted(sizes, reverse=True)
