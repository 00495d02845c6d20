"""The picture of a run: bits per byte over steps, with what has to be beaten."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def plot_losses(records: Sequence[Mapping[str, Any]], baselines: Mapping[str, float], path: str | Path) -> None:
    """A PNG at `path` of a log's records, with a horizontal line for each of `baselines` (bits per byte by name).

    Validations on the first batches are one line, which ends in the last step's value on the same batches. The
    validation on the whole text, another measure, is a mark of its own.
    """
    # No pyplot: it has global state, and would look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    training = [(r["step"], r["bits_per_byte"]) for r in records if "bits_per_byte" in r]
    first_batches, whole = validations(records)
    figure = Figure(figsize=(8, 5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    if training:
        steps, values = zip(*training)
        axes.plot(steps, values, color="tab:blue", alpha=0.25, linewidth=0.8)
        axes.plot(steps, _smooth(values), color="tab:blue", label="training (smoothed)")
    if first_batches:
        axes.plot(*zip(*first_batches), "o-", color="tab:orange", markersize=4, label="validation, first batches only")
    if whole:
        label = f"validation, whole text ({whole[-1][1]:.3f})"
        axes.plot(*zip(*whole), "*", color="tab:red", markersize=12, label=label)
    for (name, value), style in zip(baselines.items(), ("--", ":", "-.")):
        axes.axhline(value, color="black", linestyle=style, linewidth=1, label=f"{name} ({value:.3f})")
    axes.set_xlabel("step")
    axes.set_ylabel("bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)


def validations(records: Sequence[Mapping[str, Any]]) -> tuple[list[tuple[int, float]], list[tuple[int, float]]]:
    """Pairs of step and bits per byte: on the first batches of the validation text, and on all of it.

    The record of a validation on the whole text has the `baselines` on it, and `first_batches_bits_per_byte`, the value
    on the batches of the short validations, where there are such.
    """
    name, first = "validation_bits_per_byte", "first_batches_bits_per_byte"
    whole = [(r["step"], r[name]) for r in records if name in r and "baselines" in r]
    short = [(r["step"], r[name]) for r in records if name in r and "baselines" not in r]
    return short + [(r["step"], r[first]) for r in records if first in r], whole


def _smooth(values: Sequence[float], decay: float = 0.95) -> list[float]:
    """An exponential average without the bias of its start."""
    out, total, weight = [], 0.0, 0.0
    for value in values:
        total, weight = decay * total + (1 - decay) * value, decay * weight + (1 - decay)
        out.append(total / weight)
    return out
