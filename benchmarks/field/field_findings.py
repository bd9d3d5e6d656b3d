"""What `make bench-exchange` measured, and its last line. Pure."""

from dataclasses import dataclass, field
from statistics import fmean
from typing import Any


@dataclass
class Findings:
    """All that was measured; the plots and the last line are made of it."""

    machine: dict[str, Any] = field(default_factory=dict)
    pipeline: list[dict[str, Any]] = field(default_factory=list)
    alone: dict[str, Any] = field(default_factory=dict)
    loss: list[dict[str, Any]] = field(default_factory=list)
    utilisation: dict[str, float] = field(default_factory=dict)
    churn: dict[str, dict[str, Any]] = field(default_factory=dict)
    unequal_of_sum: float | None = None
    unequal_rates: dict[str, list[float]] = field(default_factory=dict)
    equal_work: dict[str, Any] = field(default_factory=dict)
    unscaled: dict[str, float] = field(default_factory=dict)
    model_errors: list[dict[str, Any]] = field(default_factory=list)


def summarise(findings: Findings) -> dict[str, Any]:
    """Return the benchmark's last line."""
    by_cell = {(row["system"], row["line"]): row for row in findings.loss}

    def ratio_to_ours(system: str, line: str = "100mbit") -> float | None:
        ours, theirs = by_cell.get(("ours_updates", line)), by_cell.get((system, line))
        if not (ours and theirs and ours["seconds"] and theirs["seconds"]):
            return None
        return round(theirs["seconds"] / ours["seconds"], 2)

    ratios = {
        row["bits"]: row["ratio"]
        for row in findings.pipeline
        if row["model"] == "GPT 1.3B" and row["megabits"] == 20
    }
    errors = [
        abs(row["ratio"] / row["closed_form"] - 1) for row in findings.pipeline if row["ratio"]
    ]
    return {
        "pipeline": {
            "ratio_1p3b_20mbit_16bit": ratios.get(16),
            "ratio_1p3b_20mbit_8bit": ratios.get(8),
            "closed_form_error": round(fmean(errors), 3) if errors else None,
        },
        "ddp": {"ratio_100mbit": ratio_to_ours("torch_ddp")},
        "decent_dp": {
            "ratio_100mbit": ratio_to_ours("decent_dp_adam"),
            "step_time_ratio": findings.equal_work.get("step_time_ratio"),
        },
        "hivemind": {"ratio_100mbit": ratio_to_ours("hivemind_optimizer")},
        "diloco": {"ratio_100mbit": ratio_to_ours("torchft_diloco")},
        "utilisation": {name: findings.utilisation.get(name) for name in ("50mbit", "home")},
        "unequal_of_sum": findings.unequal_of_sum,
        "runtime_model_error": max((row["error"] for row in findings.model_errors), default=None),
    }
