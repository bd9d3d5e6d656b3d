"""Draw what `make bench-exchange` measured."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from field_findings import Findings
from links import NAMED_MODELS, pipeline_ratio

DOCUMENTS = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
RATES = [10 * 10 ** (exponent / 20) for exponent in range(45)]  # Mb/s
WORKERS = 4
SYSTEM_NAMES = {
    "ours_updates": "Barnraise",
    "torch_ddp": "torch DDP",
    "decent_dp_adam": "decent-dp 0.2.3",
    "hivemind_optimizer": "hivemind 1.1.12",
    "torchft_diloco": "torchft DiLoCo",
}
LINE_NAMES = {"home": "home 15/112", "100mbit": "100 Mb/s", "1000mbit": "1,000 Mb/s"}
# DiLoCo with H = 128 on real links, measured by other authors: the share of time that computes.
PUBLISHED_UTILISATION = {50: 0.116, 200: 0.36, 1000: 0.715}


def draw_plots(findings: Findings, target_loss: float, folder: Path = DOCUMENTS) -> None:
    """Write one plot of each part that was measured."""
    if findings.pipeline:
        _draw_crossover(findings.pipeline, folder / "exchange_crossover.png")
    if findings.loss:
        _draw_times(findings, target_loss, folder / "exchange_times.png")
        _draw_losses(findings, target_loss, folder / "exchange_losses.png")
    if findings.utilisation:
        _draw_utilisation(findings.utilisation, folder / "exchange_utilisation.png")
    if findings.churn:
        _draw_churn(findings.churn, folder / "exchange_churn.png")
    if findings.unequal_rates:
        _draw_unequal(findings.unequal_rates, folder / "exchange_unequal.png")
    if findings.equal_work:
        _draw_equal_work(findings.equal_work, folder / "exchange_equal_work.png")


def _draw_crossover(rows: list[dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    for shape, colour in zip(NAMED_MODELS, ("C0", "C1", "C2"), strict=True):
        for bits, style in ((16, "-"), (8, "--")):
            curve = [pipeline_ratio(WORKERS, shape, bits / 8, rate * 1e6) for rate in RATES]
            label = f"{shape.name}, {bits} bits"
            axes.plot(RATES, curve, style, color=colour, linewidth=1, label=label)
            mark = "o" if bits == 16 else "s"
            cells = [r for r in rows if (r["model"], r["bits"]) == (shape.name, bits)]
            for row in [cell for cell in cells if cell["ratio"]]:
                fill = colour if row["kind"] == "measured" else "none"
                axes.plot(row["megabits"], row["ratio"], mark, color=colour, markerfacecolor=fill)
    axes.axhline(1, color="grey", linewidth=0.7)
    axes.set(xscale="log", yscale="log", xlabel="line, Mb/s each way")
    axes.set_ylabel("tokens/s of full copies over a pipeline's")
    axes.set_title("Lines: closed form; points: on scaled lines, filled ones measured", fontsize=10)
    axes.legend(fontsize=8)
    _save(figure, path)


def _draw_times(findings: Findings, target_loss: float, path: Path) -> None:
    rows = findings.loss
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    width = 0.8 / len(SYSTEM_NAMES)
    for place, (system, name) in enumerate(SYSTEM_NAMES.items()):
        has_label = False
        times = {row["line"]: row for row in rows if row["system"] == system and row["seconds"]}
        for x, line in enumerate(LINE_NAMES):
            if line in times:
                is_measured = times[line]["kind"] == "measured"
                axes.bar(
                    x + place * width,
                    times[line]["seconds"],
                    width,
                    color=f"C{place}",
                    alpha=1.0 if is_measured else 0.45,
                    label=None if has_label else name,
                )
                has_label = True
    if alone_seconds := findings.alone.get("seconds"):
        label = "one machine alone"
        axes.axhline(alone_seconds, color="grey", linestyle=":", label=label)
    axes.set_xticks([x + 0.4 - width / 2 for x in range(len(LINE_NAMES))], LINE_NAMES.values())
    axes.set(yscale="log", ylabel=f"seconds to {target_loss:g} nats a byte")
    axes.set_title("Scaled lines; pale: few steps timed and multiplied", fontsize=10)
    axes.legend(fontsize=8)
    _save(figure, path)


def _draw_losses(findings: Findings, target_loss: float, path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 4.5))
    ours = {row["line"]: row["losses"] for row in findings.loss if row["system"] == "ours_updates"}
    for line, name in LINE_NAMES.items():
        if ours.get(line):
            axes.plot(*zip(*ours[line], strict=True), label=f"Barnraise, {name}")
    if curve := findings.alone.get("losses"):
        axes.plot(*zip(*curve, strict=True), ":", color="grey", label="one machine alone")
    axes.axhline(target_loss, color="grey", linewidth=0.7)
    axes.set(xlabel="seconds", ylabel="nats a byte of the shared weights", ylim=(1.2, 5.6))
    axes.set_title("Four machines on scaled lines", fontsize=10)
    axes.legend(fontsize=8)
    _save(figure, path)


def _draw_utilisation(measured: dict[str, float], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.5))
    published = PUBLISHED_UTILISATION
    axes.plot(list(published), list(published.values()), "s--", label="DiLoCo, H = 128, published")
    rates = {"home": 15, "50mbit": 50}
    points = sorted((rates[name], value) for name, value in measured.items())
    axes.plot(*zip(*points, strict=True), "o", label="Barnraise, measured on scaled lines")
    axes.set(xscale="log", ylim=(0, 1.05), xlabel="line, Mb/s up", ylabel="share of time computing")
    ticks = sorted({*rates.values(), *published})
    axes.set_xticks(ticks, [f"{tick:,g}" for tick in ticks])
    axes.minorticks_off()
    axes.legend(fontsize=8)
    _save(figure, path)


def _draw_churn(measured: dict[str, dict[str, Any]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.5))
    for place, (system, name) in enumerate(SYSTEM_NAMES.items()):
        if system in measured:
            row = measured[system]
            survives = row["outcome"] == "survives"
            bar = axes.barh(
                name, row["tokens_per_second"], color=f"C{place}", alpha=1.0 if survives else 0.45
            )
            axes.bar_label(bar, [row["outcome"]], padding=4, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.set(xlabel="tokens/s of all four workers; pale: until it hangs or ends")
    axes.set_title("One of four workers killed and restarted, one after the other", fontsize=10)
    _save(figure, path)


def _draw_unequal(rates: dict[str, list[float]], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(7.5, 3.5))
    width = 0.4
    for place, (kind, name) in enumerate((("alone", "alone"), ("ours", "together"))):
        places = [x + place * width for x in range(len(rates[kind]))]
        axes.bar(places, rates[kind], width, label=name, color="0.6" if kind == "alone" else "C0")
    names = [f"machine {n + 1}" for n in range(len(rates["ours"]))]
    axes.set_xticks([x + width / 2 for x in range(len(names))], names)
    axes.set(ylabel="tokens/s")
    axes.set_title("Machines of speeds 1:2:4:7", fontsize=10)
    axes.legend(fontsize=8)
    _save(figure, path)


def _draw_equal_work(measured: dict[str, Any], path: Path) -> None:
    figure, (losses, times) = plt.subplots(1, 2, figsize=(7.5, 3.5))
    for key, name, style in (
        ("losses", "Barnraise, decentralised Adam", "o-"),
        ("decent_dp_losses", "decent-dp 0.2.3", "s--"),
    ):
        # The first snapshots differ: decent-dp's is of the weights before its first step.
        losses.plot(*zip(*measured[key][1:], strict=True), style, label=name)
    losses.set(xlabel="step", ylabel="nats a byte")
    losses.legend(fontsize=8)
    ratios = measured["step_time_ratios"]
    times.bar(range(1, len(ratios) + 1), ratios, color="C0")
    times.axhline(1, color="grey", linewidth=0.7)
    times.set_xticks(range(1, len(ratios) + 1))
    times.set(xlabel="pair", ylabel="step time, ours over decent-dp's")
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
