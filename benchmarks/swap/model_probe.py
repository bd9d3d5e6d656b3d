"""Measure the CPU at the sizes of one model, next to the steps whose time is predicted."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from statistics import fmean

from barnraise.planning.hardware import Hardware, cpu_name, retain_freed_memory
from barnraise.spec import ModelSpec
from barnraise.swap import hardware_probe

MODEL_RATES_SECONDS = 3.0  # for the rates at one model's sizes


def create_model_probe(folder: Path, model: ModelSpec) -> Callable[[], Hardware]:
    """Return a function that measures the CPU at the sizes of one model, in four seconds.

    Each call measures what the model's plans take in fp32 *now*, on a machine that other programs
    use too. The rates are of mean times, because a step is slowed down by other programs as well.
    """
    retain_freed_memory()
    calls = hardware_probe.product_calls("cpu", "float32", (model.width,), (model.vocabulary,))
    calls |= hardware_probe.memory_calls("cpu")
    crossing = (model.context, model.head_width)
    calls |= hardware_probe.attention_calls("cpu", "float32", (model.context,), (), crossing)
    plain_update = ("host float32", 32)
    calls[plain_update] = hardware_probe.update_calls("host")[plain_update]

    def measure() -> Hardware:
        disk_rates = hardware_probe.measure_disk(folder)
        rates = hardware_probe.measure_rates(calls, "cpu", MODEL_RATES_SECONDS, fmean)
        hardware = hardware_probe.build_hardware(
            ("cpu", cpu_name()), ["float32"], rates, disk_rates
        )
        # The disk is measured now, and priced for the same minutes.
        return dataclasses.replace(hardware, disk_write_sustained=hardware.disk_write)

    return measure
