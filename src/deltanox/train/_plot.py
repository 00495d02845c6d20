"""The picture of a run: bits per byte over steps, with what has to be beaten."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_losses(records: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], path: str | Path) -> None:
    """A PNG at `path` of a log's records, with a horizontal line for each of `baselines` (bits per byte by name)."""
    # No pyplot: it has global state, and would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training = [(r["step"], r["bits_per_byte"]) for r in records if "bits_per_byte" in r]
    validation = [(r["step"], r["validation_bits_per_byte"]) for r in records if "validation_bits_per_byte" in r]
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if training:
        steps, values = zip(*training)
        axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(values), color="tab:blue", label="training (smoothed)")
    if validation:
        axes.plot(*zip(*validation), "o-", color="tab:red", markersize=4, label="validation")
    for (name, value), style in zip(baselines.items(), ("--", ":", "-.")):
        axes.axhline(value, color="black", linestyle=style, linewidth=1, label=f"{name} ({value:.3f})")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def _smooth(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """An exponential average without the bias of its start."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(total / weight)
    return out
