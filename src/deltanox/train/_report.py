"""What a run says of its steps: the log and the bar, without waiting for the device."""

import math
import time
from collections import deque
from pathlib import Path

import jax
from tqdm import tqdm

from deltanox.train._checkpoint import find_checkpoint
from deltanox.train._log import Log
from deltanox.train._signals import wait_for
from deltanox.train._step import Metrics

# Calls whose metrics may be on their way while the next ones are dispatched. A bound is needed: without one the
# queue, and the batches in it, would grow without limit.
_LAG = 2


class TrainingDiverged(RuntimeError):
    """The loss, the gradient or what would be saved is not finite; the message says at which step and what is left."""


class Report:
    """Takes the metrics of steps as they are dispatched, and reads them `_LAG` steps later."""

    def __init__(self, log: Log, bar: tqdm, tokens: int, directory: Path):
        self.log, self.bar, self.tokens, self.directory = log, bar, tokens, directory
        self.pending: deque[tuple[int, int, Metrics]] = deque()
        self.restart()

    def restart(self) -> None:
        """Forget the time: what has passed since the last step was not spent on training."""
        self.time, self.rate = time.perf_counter(), None

    def push(self, step: int, count: int, metrics: Metrics) -> None:
        """The first `count` values of `metrics` belong to the steps up to `step`."""
        self.pending.append((step, count, metrics))
        while len(self.pending) > _LAG:
            self._read()

    def drain(self) -> None:
        while self.pending:
            self._read()

    def _read(self) -> None:
        last, count, metrics = self.pending.popleft()
        wait_for(metrics)
        metrics = jax.device_get(metrics)
        now = time.perf_counter()
        rate = count * self.tokens / max(now - self.time, 1e-9)
        self.time = now
        self.rate = rate if self.rate is None else 0.9 * self.rate + 0.1 * rate
        for i in range(count):
            self._write(last - count + 1 + i, {name: float(x[i]) for name, x in metrics._asdict().items()}, rate)

    def _write(self, step: int, values: dict[str, float], rate: float) -> None:
        self.log.write(step=step, **values, tokens_per_second=round(rate, 1))
        self.bar.set_postfix_str(f"{values['bits_per_byte']:.3f} bits/byte, {self.rate:,.0f} tokens/s", refresh=False)
        self.bar.update()
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(values[name]):
                raise diverged(f"{name.replace('_', ' ')} is {values[name]}", step, self.directory)


def diverged(what: str, step: int, directory: Path) -> TrainingDiverged:
    """The error of a run whose numbers are no longer finite at `step`."""
    left = find_checkpoint(directory)
    remedy = "a lower optimiser.learning_rate, a longer warm-up or a smaller optimiser.clip_norm"
    if left.field("step", int) >= step:
        return TrainingDiverged(
            f"{what} at step {step}; its checkpoint `{left.folder}` is of finite numbers, but of no use: start a run "
            f"with {remedy}"
        )
    return TrainingDiverged(
        f"{what} at step {step}; the run stops, and the last good checkpoint is `{left.folder}` (step "
        f"{left.record['step']}): resume from it is exact and would end here again, so start a run with {remedy}"
    )
