"""Observe how busy this machine is, and what its worker logs, for its owner's page on the site."""

import logging
import os
import re
from collections import deque
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, Literal

import psutil

from barnraise.coordinator_client.redaction import redact
from barnraise.protocol.reports import (
    MAX_LOG_LINES,
    MAX_LOG_TEXT,
    LimitsView,
    LogLine,
    SystemView,
)

QUEUED_LINES = 60  # that wait for the next reports: the newest
# The sensors of a CPU's whole package, as Linux drivers call them.
CPU_SENSORS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "cpu-thermal", "acpitz")
Level = Literal["info", "warning", "error"]
LEVELS: dict[int, Level] = {logging.INFO: "info", logging.WARNING: "warning"}
_UNPRINTABLE = re.compile(r"\s+")


class MachineMonitor:
    """Measures the machine for its reports. Its methods may be called from any thread.

    Attributes:
        limits: what the machine's owner allows the worker to use.
    """

    def __init__(self, limits: LimitsView | None = None, gpu_index: int | None = None) -> None:
        """Start measuring; `gpu_index` is None on a machine that trains on its CPU."""
        self.limits = limits
        self._process = psutil.Process()
        self._cores = os.cpu_count() or 1
        self._gpu = GpuSensor(gpu_index) if gpu_index is not None else None
        self._lines: deque[LogLine] = deque(maxlen=QUEUED_LINES)
        self._lock = Lock()
        # A first call of these has nothing to compare with.
        psutil.cpu_percent(None)
        self._process.cpu_percent(None)

    def set_limits(self, limits: LimitsView) -> None:
        """Report other limits from now on: the owner may change them at any time."""
        self.limits = limits

    def measure_system(self) -> SystemView:
        """Measure the shares since the last call, and memory and temperatures now."""
        memory = psutil.virtual_memory()
        gpu = self._gpu.measure() if self._gpu else {}
        return SystemView(
            cpu=_to_share(psutil.cpu_percent(None)),
            worker_cpu=_to_share(self._process.cpu_percent(None) / self._cores),
            memory_used=memory.total - memory.available,
            memory_total=memory.total,
            worker_memory=self._process.memory_info().rss,
            cpu_celsius=read_cpu_celsius(),
            **gpu,
        )

    def add_line(self, line: LogLine) -> None:
        """Queue a line of the log for the next report."""
        with self._lock:
            self._lines.append(line)

    def pop_lines(self) -> list[LogLine]:
        """Return the oldest queued lines, at most as many as a report may carry."""
        with self._lock:
            count = min(MAX_LOG_LINES, len(self._lines))
            return [self._lines.popleft() for _ in range(count)]


class GpuSensor:
    """Reads an NVIDIA GPU's load, memory and temperature through its driver's library."""

    def __init__(self, index: int) -> None:
        """Open the driver's library. Without it, `measure` returns nothing."""
        import pynvml

        self._library: Any = None
        self._device: Any = None
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            self._device = pynvml.nvmlDeviceGetHandleByIndex(index)
            self._library = pynvml

    def measure(self) -> dict[str, Any]:
        """Return the fields of a `SystemView` that the driver answers now."""
        library = self._library
        if library is None:
            return {}
        fields: dict[str, Any] = {}
        # Laptops and virtual GPUs answer some questions only.
        with suppress(library.NVMLError):
            fields["gpu"] = _to_share(library.nvmlDeviceGetUtilizationRates(self._device).gpu)
        with suppress(library.NVMLError):
            memory = library.nvmlDeviceGetMemoryInfo(self._device)
            fields |= {"gpu_memory_used": memory.used, "gpu_memory_total": memory.total}
        with suppress(library.NVMLError):
            sensor = library.NVML_TEMPERATURE_GPU
            fields["gpu_celsius"] = float(library.nvmlDeviceGetTemperature(self._device, sensor))
        return fields


class OwnersLogHandler(logging.Handler):
    """Queues what the worker logs for its owner's page, without secrets and home folders."""

    def __init__(self, monitor: MachineMonitor) -> None:
        super().__init__(logging.INFO)
        self._monitor = monitor

    def emit(self, record: logging.LogRecord) -> None:
        """Queue one record."""
        try:
            text = shorten_line(record.getMessage())
            level = LEVELS.get(record.levelno, "error")
            self._monitor.add_line(LogLine(at=record.created, level=level, text=text))
        except Exception:  # logging's own convention: a handler never fails its caller
            self.handleError(record)


def shorten_line(message: str) -> str:
    """Return a message as one short line without secrets, control characters and home folders."""
    text = _shorten_home(_UNPRINTABLE.sub(" ", redact(message)))
    text = "".join(c for c in text if c.isprintable()).strip()
    return text if len(text) <= MAX_LOG_TEXT else text[: MAX_LOG_TEXT - 1] + "…"


def _shorten_home(text: str) -> str:
    """Return a text with "~" for the home folder, where there is one and it is not the root."""
    with suppress(RuntimeError):  # a container's user often has none
        home = str(Path.home())
        return text.replace(home, "~") if home.strip("/\\") else text
    return text


def read_cpu_celsius() -> float | None:
    """Return the CPU's temperature; None where the system does not reveal it."""
    read = getattr(psutil, "sensors_temperatures", None)  # absent on Windows and macOS
    if read is None:
        return None
    try:
        sensors = read()
    except (OSError, RuntimeError, ValueError):  # drivers may answer nonsense
        return None
    for name in CPU_SENSORS:
        values = [sensor.current for sensor in sensors.get(name, ()) if sensor.current]
        if values and -100 <= max(values) <= 300:
            return round(max(values), 1)
    return None


def _to_share(percent: float) -> float:
    """Return a percentage as a share of 1."""
    return round(min(100.0, max(0.0, percent)) / 100, 3)
