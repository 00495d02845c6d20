"""Sides of a comparison measured in turn: on a machine with other work one time of each says little."""

from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

Measured = TypeVar("Measured")


def in_turn(sides: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """What each side gives in each round. In every round each side runs once, so that what disturbs one of them for a
    while disturbs all."""
    results: dict[str, list[Measured]] = {side: [] for side in sides}
    for _ in range(rounds):
        for side, run in sides.items():
            results[side].append(run())
    return results


def spread(seconds: Iterable[float]) -> str:
    """How far the slowest round is above the fastest, such as `+12 %`. Large: the machine had other work."""
    seconds = list(seconds)
    return f"+{100 * (max(seconds) / min(seconds) - 1):.0f} %"
