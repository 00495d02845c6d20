"""The training loop: from a config to a trained model, with a log, checkpoints, a picture and what it is worth."""

import itertools
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

from deltanox.train._baselines import gzip_bits_per_byte, markov_bits_per_byte, num_bytes
from deltanox.train._checkpoint import Checkpoint, find_checkpoint, load_arrays, save_checkpoint
from deltanox.train._config import Config, config_to_dict, differences
from deltanox.train._data import (
    Batch,
    DataPosition,
    Document,
    TrainingData,
    fingerprint,
    read_documents,
    split_documents,
    standard_library,
    validation_batches,
)
from deltanox.train._log import Log, read_log
from deltanox.train._optimiser import learning_rate_schedule, make_optimiser
from deltanox.train._plot import plot_losses
from deltanox.train._step import Metrics, init_state, make_evaluation, make_step, repeat_step

# Calls whose metrics may be on their way while the next ones are dispatched. A bound is needed: without one the
# queue, and the batches in it, would grow without limit.
_LAG = 2


class TrainingDiverged(RuntimeError):
    """The loss or the gradient is not a finite number; the message says at which step and what is left."""


class Result(NamedTuple):
    """What a run ends with: its folder, the model, and bits per byte on the validation text, its own and others'."""

    directory: Path
    model: Any
    validation: float
    markov: float
    gzip: float


def default_model(config: Config, key: jax.Array) -> Any:
    """The model that the config describes."""
    from deltanox.models import qwen3_5

    precision = config.precision
    return qwen3_5(
        config.model,
        implementation=config.implementation,
        state_dtype=precision.state,
        decay_dtype=precision.decay,
        strict_hf_rounding=precision.strict_hf_rounding,
        dtype=precision.parameter,
        unroll=config.train.unroll,
        key=key,
    )


def train(
    config: Config,
    *,
    text: Sequence[str | Path] = (),
    resume: str | Path | None = None,
    name: str = "run",
    make_model: Callable[[Config, jax.Array], Any] = default_model,
    sample: Callable[[Any, Config, jax.Array], str] | None = None,
    say: Callable[[str], None] = print,
    progress: bool = True,
) -> Result:
    """Train the model of `config`.

    **Arguments**:

    - `config`: see `read_config`.
    - `text`: files and folders; none for the standard library's sources (on a resumption: for the text of that run).
    - `resume`: the folder of a run, which goes on from its newest checkpoint. Its losses are bit for bit those of a
      run that was never stopped (same machine, same versions).
    - `name`: of the folder under `runs/`, where the config gives no directory.
    - `make_model`: `(config, key) -> model`, another model than the config's own.
    - `sample`: `(model, config, key) -> text`, called at the end.
    - `say`: where sentences go. `progress`: whether there is a bar.

    **Returns**: a `Result`.

    **Raises**: `ValueError` for what does not fit together (text, config, checkpoint); `TrainingDiverged`.
    """
    checkpoint = None if resume is None else _find(resume)
    if checkpoint is not None:
        changed = differences(checkpoint.record["config"], config_to_dict(config))
        if changed:
            raise ValueError(
                f"checkpoint: `{checkpoint.folder}` was written with another config ({'; '.join(changed)}); resume "
                "with the config it was written with, or start a new run"
            )
        text = text or checkpoint.record["data"]["text"]
    documents = read_documents(text) if text else standard_library()
    training, validation = split_documents(
        documents, config.data.validation_fraction, config.data.validation_bytes or None
    )
    text_hash = fingerprint(documents)
    if checkpoint is not None and checkpoint.record["data"]["fingerprint"] != text_hash:
        raise ValueError(
            f"checkpoint: `{checkpoint.folder}` was written on other text than what is under "
            f"{', '.join(map(str, text)) or 'the standard library'} now; give that text with --text, or start a new run"
        )
    directory = _directory(config, name) if checkpoint is None else checkpoint.folder.parent.parent
    directory.mkdir(parents=True, exist_ok=True)

    data = TrainingData(training, config.data.row_length, config.data.batch_size, config.data.seed)
    key, model_key = jax.random.split(jax.random.key(config.train.seed))
    model = config.precision.cast_parameters(make_model(config, model_key))
    state, static, optimiser = init_state(
        model, lambda parameters: make_optimiser(config.optimiser, config.train.steps, parameters), key=key
    )
    del model
    position, first_step = DataPosition(), 0
    if checkpoint is not None:
        state = load_arrays(checkpoint, state)
        position, first_step = DataPosition(*checkpoint.record["data"]["position"]), checkpoint.record["step"]

    size = sum(x.size for x in jax.tree.leaves(state.parameters))
    epoch_steps = data.batches_per_epoch / config.train.accumulation
    say(
        f"{size / 1e6:.2f} M parameters; {num_bytes(training) / 1e6:.2f} MB of text for training "
        f"in {len(training)} files, {num_bytes(validation) / 1e6:.2f} MB for validation in {len(validation)}; "
        f"{config.train.steps} steps are {config.train.steps / epoch_steps:.2f} epochs; {directory}"
    )
    baselines = {
        "gzip -9": gzip_bits_per_byte(validation),
        "Markov, order 2": markov_bits_per_byte(training, validation),
    }

    def save(step: int) -> None:
        save_checkpoint(
            directory / "checkpoints",
            state,
            step,
            {
                "config": config_to_dict(config),
                "data": {
                    "position": list(position),
                    "fingerprint": text_hash,
                    "text": [str(Path(path).resolve()) for path in text],
                },
            },
            keep=config.train.keep_checkpoints,
        )

    if checkpoint is None:
        save(0)
    step_function = make_step(
        static,
        optimiser,
        learning_rate_schedule(config.optimiser, config.train.steps),
        config.precision,
        balance_weight=config.train.balance_weight,
        balance_loss=_balance_loss,
        further_weight=config.train.further_weight,
        remat=config.remat,
    )
    most = config.train.steps_per_call
    step_function = repeat_step(step_function, most)
    batches, _ = _next(data, position, config.train.accumulation, 1, most)
    start = time.perf_counter()
    step_function = jax.jit(step_function, donate_argnums=0).lower(state, batches, np.int32(1)).compile()
    say(f"compiled the step in {time.perf_counter() - start:.1f} s")
    evaluate = jax.jit(make_evaluation(static, config.precision))

    log = Log(directory / "log.jsonl", step=first_step)
    bar = tqdm(total=config.train.steps, initial=first_step, unit="step", disable=not progress, dynamic_ncols=True)
    report = _Report(log, bar, batches.tokens[0].size, directory)
    step = first_step
    try:
        while step < config.train.steps:
            count = _count(config, step)
            batches, next_position = _next(data, position, config.train.accumulation, count, most)
            state, metrics = step_function(state, batches, np.int32(count))
            position, step = next_position, step + count
            report.push(step, count, metrics)
            last = step == config.train.steps
            every = config.train.checkpoint_every
            if last or (every and step % every == 0):
                report.drain()
                save(step)
            every = config.train.validate_every
            if every and step % every == 0 and not last:
                report.drain()
                some = _validation(config, validation, limit=config.train.validation_batches)
                log.write(step=step, validation_bits_per_byte=_evaluate(evaluate, state.parameters, some))
                report.restart()
        bar.close()
        start = time.perf_counter()
        bits = _evaluate(evaluate, state.parameters, _validation(config, validation))
        log.write(step=config.train.steps, validation_bits_per_byte=bits, baselines=baselines)
        say(
            f"validation, bits per byte: model {bits:.4f}, Markov model of order 2 {baselines['Markov, order 2']:.4f}, "
            f"gzip -9 {baselines['gzip -9']:.4f} ({time.perf_counter() - start:.1f} s)"
        )
    except KeyboardInterrupt:
        bar.close()
        say(f"stopped; go on from the newest checkpoint with: deltanox train --resume {directory}")
        raise
    finally:
        bar.close()
        log.close()
        plot_losses(read_log(directory / "log.jsonl"), baselines, directory / "loss.png")
    from equinox import combine

    model = config.precision.cast_compute(combine(state.parameters, static))
    if sample is not None and config.train.sample_tokens:
        say(sample(model, config, state.key))
    return Result(directory, model, bits, baselines["Markov, order 2"], baselines["gzip -9"])


class _Report:
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
                left = find_checkpoint(self.directory)
                raise TrainingDiverged(
                    f"{name.replace('_', ' ')} is {values[name]} at step {step}; the run stops, and the last good "
                    f"checkpoint is `{left.folder}` (step {left.record['step']}): resume from it is exact and "
                    "would end here again, so start a run with a lower optimiser.learning_rate, a longer warm-up or a "
                    "smaller optimiser.clip_norm"
                )


def _find(resume: str | Path) -> Checkpoint:
    checkpoint = find_checkpoint(resume)
    newest = find_checkpoint(checkpoint.folder.parent)
    if newest.folder != checkpoint.folder:
        raise ValueError(
            f"checkpoint: `{newest.folder.name}` is newer than `{checkpoint.folder}`; give the run's folder, or "
            "delete the newer checkpoints first"
        )
    return checkpoint


def _directory(config: Config, name: str) -> Path:
    """The folder of a new run: the config's, where no run may be, or the first such of runs/name, runs/name-2 ..."""

    def free(path: Path) -> bool:
        return not (path / "log.jsonl").exists() and not any(path.glob("checkpoints/step_*"))

    if config.train.directory:
        path = Path(config.train.directory)
        if not free(path):
            raise ValueError(
                f"train.directory: `{path}` holds a run already; resume with --resume {path}, or give another folder"
            )
        return path
    names = itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))
    return next(path for path in (Path("runs", name) for name in names) if free(path))


def _count(config: Config, step: int) -> int:
    """Steps of the next call: not beyond the next checkpoint or validation."""
    every = [every for every in (config.train.checkpoint_every, config.train.validate_every) if every]
    return min(config.train.steps_per_call, config.train.steps - step, *(e - step % e for e in every))


def _next(data: TrainingData, position: DataPosition, parts: int, count: int, most: int) -> tuple[Batch, DataPosition]:
    """The batches [most parts B T] of the next `count` steps; behind them the last one again, which nobody reads."""
    batches = []
    for _ in range(count * parts):
        batch, position = data(position)
        batches.append(batch)
    batches += batches[-parts:] * (most - count)
    return jax.tree.map(lambda *x: np.stack(x).reshape(most, parts, *x[0].shape), *batches), position


def _validation(config: Config, documents: Sequence[Document], limit: int | None = None):
    return itertools.islice(validation_batches(documents, config.data.row_length, config.data.batch_size), limit)


def _evaluate(evaluate: Callable, parameters: Any, batches) -> float:
    nats, total = 0.0, 0
    for batch in batches:
        sums = jax.device_get(evaluate(parameters, batch))
        nats, total = nats + float(sums.nats), total + int(sums.bytes)
    return nats / math.log(2) / total


def _balance_loss(stats: Any) -> jax.Array:
    from deltanox.nn import load_balance_loss

    return load_balance_loss(stats)
