"""The training loop: from a config to a trained model, with a log, checkpoints, a picture and what it is worth."""

import contextlib
import itertools
import math
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np

from deltanox import _console as console
from deltanox._oserror import expand_home, sentence
from deltanox.nn import merge_lora
from deltanox.train._adapt import adapt
from deltanox.train._baselines import archive_bits_per_byte, gzip_bits_per_byte, markov_bits_per_byte
from deltanox.train._checkpoint import Checkpoint, NonFinite, load_arrays, save_checkpoint
from deltanox.train._config import config_to_dict, differences
from deltanox.train._data import Batch, Corpus, DataPosition, TrainingData, validation_batches
from deltanox.train._documents import (
    Document,
    describe_split,
    fingerprint,
    read_documents,
    size_in_words,
    split_documents,
    standard_library,
)
from deltanox.train._folder import (
    CHECKPOINTS,
    LOG,
    PICTURE,
    TOKENIZER,
    beside,
    identify,
    load_frozen,
    new_run,
    resumed_run,
    run_vocabulary,
    save_frozen,
)
from deltanox.train._log import Log, read_log
from deltanox.train._optimiser import learning_rate_schedule, make_optimiser
from deltanox.train._plot import plot_losses
from deltanox.train._report import Report, diverged
from deltanox.train._settings import Config, check_trainable
from deltanox.train._signals import StopRequest, TrainingStopped, stop_requests, wait_for
from deltanox.train._step import TrainState, init_state, make_evaluation, make_step, repeat_step
from deltanox.train._terminal import progress_bar, unbreakable
from deltanox.train._versions import changed_versions, versions
from deltanox.train._vocabulary import Vocabulary

# The Markov model counts this much text, in 24 times the memory.
_MARKOV_BYTES = 50_000_000


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
        residuals=config.residuals,
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
    sample: Callable[[Any, Config, Vocabulary, jax.Array], str] | None = None,
    say: Callable[[str], None] = console.say,
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
    - `sample`: `(model, config, vocabulary, key) -> text`, called at the end.
    - `say`: where sentences go. `progress`: whether there is a bar.

    **Returns**: a `Result`.

    A signal (Ctrl-C, SIGTERM) ends the run after its current step, which is saved.

    **Raises**: `ValueError` for what does not fit together (text, tokenizer, config, checkpoint), and where another
    process has the run open; `TrainingDiverged`; `TrainingStopped` after a signal; `OSError` with the path where the
    run cannot be saved.
    """
    check_trainable(config.precision)
    say = unbreakable(say)
    with contextlib.ExitStack() as stack:
        checkpoint = None if resume is None else stack.enter_context(resumed_run(resume))
        if checkpoint is not None:
            _check_resumption(checkpoint, config, say)
            text = text or checkpoint.field("data.text", list[str])
        return _train(
            config, [expand_home(path) for path in text], checkpoint, name, make_model, sample, say, progress, stack
        )


def data_position(checkpoint: Checkpoint) -> DataPosition:
    """Where a run was in its data.

    **Raises**: `ValueError` for a record that does not say so.
    """
    position = checkpoint.field("data.position", list[int])
    if len(position) != 2 or min(position) < 0:
        raise ValueError(
            f"checkpoint: `{checkpoint.folder}` must say two numbers of at least 0 in `data.position`, but it says "
            f"{position[:4]}: resume from another checkpoint"
        )
    return DataPosition(*position)


def _check_resumption(checkpoint: Checkpoint, config: Config, say: Callable[[str], None]) -> None:
    """Refuse another config than the run's, but for more steps after all of them were done; say what else changed."""
    old, new = checkpoint.field("config", dict), config_to_dict(config)
    was, now, step = checkpoint.field("config.train.steps", int), config.train.steps, checkpoint.field("step", int)
    if step == was < now:
        old = old | {"train": old["train"] | {"steps": now}}
    if changed := differences(old, new):
        longer = "; a run can be made longer once all its steps are done" if step < was < now else ""
        raise ValueError(
            f"checkpoint: `{checkpoint.folder}` was written with another config ({'; '.join(changed)}); resume "
            f"with the config it was written with, or start a new run{longer}"
        )
    if step == was == now:
        say(f"all {was} steps of the run are done; to train it longer, add --set train.steps={2 * was}, or more")
    elif step == was:
        say(
            f"all {was} steps of the run are done; it is trained to step {now}, with the learning rates that a run of "
            f"{now} steps has there"
        )
    if other := changed_versions(checkpoint.record):
        say(other)


def _train(
    config: Config,
    text: Sequence[Path],
    checkpoint: Checkpoint | None,
    name: str,
    make_model: Callable[[Config, jax.Array], Any],
    sample: Callable[[Any, Config, Vocabulary, jax.Array], str] | None,
    say: Callable[[str], None],
    progress: bool,
    stack: contextlib.ExitStack,
) -> Result:
    """`train`, with the lock of the run's folder in `stack`."""
    vocabulary = run_vocabulary(config, checkpoint)
    training, validation, text_hash, used = _read(config, text, checkpoint)
    say(used)
    if checkpoint is None:
        directory = stack.enter_context(new_run(config, name))
    else:
        directory = checkpoint.folder.parent.parent

    baselines = {
        "gzip -9": gzip_bits_per_byte(validation),
        "Markov, order 2": markov_bits_per_byte(_beginning(training), validation),
    }
    archives = archive_bits_per_byte(validation)
    held_out = Corpus(validation, vocabulary)
    data = TrainingData(
        Corpus(_forgetting(training), vocabulary), config.data.row_length, config.data.batch_size, config.data.seed
    )
    state, static, optimiser = _init(config, make_model)
    position, first_step = DataPosition(), 0
    if checkpoint is not None:
        frozen = load_frozen(checkpoint, state.frozen)
        state = load_arrays(checkpoint, state._replace(frozen=None))._replace(frozen=frozen)
        position, first_step = data_position(checkpoint), checkpoint.field("step", int)

    epoch_steps = data.batches_per_epoch / config.train.accumulation
    tokens = "" if vocabulary.text is None else f" ({data.corpus.num_tokens / 1e6:.2f} M tokens)"
    say(
        f"{_parameters(state)}; {size_in_words(data.corpus.num_bytes)} of text{tokens} for training "
        f"in {len(data.corpus.sizes)} documents, {size_in_words(held_out.num_bytes)} for validation in "
        f"{len(held_out.sizes)}; {config.train.steps} steps are {config.train.steps / epoch_steps:.2f} epochs; "
        f"{directory}"
    )
    record: dict[str, Any] = {"config": config_to_dict(config), "versions": versions()}
    if (run := identify(directory, checkpoint)) is not None:
        record["run"] = run
    in_data: dict[str, Any] = {"fingerprint": text_hash, "text": [str(Path(path).resolve()) for path in text]}
    if vocabulary.text is not None:
        in_data["tokenizer"] = {"sha256": vocabulary.sha256, "end": vocabulary.end}
    if checkpoint is not None and state.frozen is not None:
        record["frozen"] = checkpoint.field("frozen", str)

    def save(step: int) -> None:
        try:
            save_checkpoint(
                directory / CHECKPOINTS,
                state._replace(frozen=None),
                step,
                record | {"data": {"position": list(position), **in_data}},
                keep=config.train.keep_checkpoints,
                finite=True,
            )
        except NonFinite as error:
            if step == 0:
                raise ValueError(f"model: {error}; start from finite parameters") from None
            raise diverged(str(error), step, directory) from None

    if checkpoint is None:
        vocabulary.keep(directory / TOKENIZER)
        if state.frozen is not None:
            record["frozen"] = save_frozen(directory, state.frozen)
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
        bytes_per_token=None if vocabulary.text is None else data.corpus.num_bytes / data.corpus.num_tokens,
    )
    most = config.train.steps_per_call
    step_function = repeat_step(step_function, most)
    batches, _ = _next(data, position, config.train.accumulation, 1, most)
    say("compiling the step: seconds for a small model, minutes for a large one")
    start = time.perf_counter()
    step_function = jax.jit(step_function, donate_argnums=0).lower(state, batches, np.int32(1)).compile()
    say(f"compiled the step in {time.perf_counter() - start:.1f} s")
    evaluate = jax.jit(make_evaluation(static, config.precision))

    log = Log(directory / LOG, step=first_step, say=say)
    bar = progress_bar(config.train.steps, first_step, progress)
    report = Report(log, bar, batches.tokens[0].size, directory)
    step = saved = first_step

    def validate(stop: StopRequest) -> None:
        bar.set_postfix_str("validating")
        bits = _evaluate(evaluate, state, config, held_out, stop, limit=config.train.validation_batches)
        if bits is not None:
            log.write(step=step, validation_bits_per_byte=_finite(bits, step, directory))
        report.restart()

    try:
        with stop_requests() as stop:
            if _owes_validation(config, log, step):
                validate(stop)
            while step < config.train.steps and not stop:
                count = _count(config, step)
                batches, next_position = _next(data, position, config.train.accumulation, count, most)
                state, metrics = step_function(state, batches, np.int32(count))
                position, step = next_position, step + count
                report.push(step, count, metrics)
                if step == config.train.steps or _due(config.train.checkpoint_every, step):
                    report.drain()
                    save(step)
                    saved = step
                if step < config.train.steps and _due(config.train.validate_every, step):
                    report.drain()
                    validate(stop)
            report.drain()
            if step != saved:
                save(step)
            bar.close()
            bits = None if stop else _validate_all(evaluate, state, config, held_out, stop, say)
            first = {}
            if bits is not None and config.train.validate_every:
                # the measure of the short validations, so that they have an end
                few = _evaluate(evaluate, state, config, held_out, stop, limit=config.train.validation_batches)
                bits = None if few is None else bits
                first = {"first_batches_bits_per_byte": few}
            if bits is None:
                raise _stopped(stop, step, config, directory)
            bits = _finite(bits, step, directory)
            last = dict(step=step, validation_bits_per_byte=bits, baselines=baselines, **first)
            if last not in log.records:  # of a run that was resumed at its end
                log.write(**last)
        say(
            f"validation, bits per byte: model {bits:.4f}, Markov model of order 2 {baselines['Markov, order 2']:.4f}, "
            f"gzip -9 {baselines['gzip -9']:.4f} file by file, {archives[0]:.4f} in one archive, xz -9 in one archive "
            f"{archives[1]:.4f}"
        )
    except TrainingStopped:
        raise
    except (KeyboardInterrupt, OSError):
        bar.close()
        say(f"stopped; go on from the newest checkpoint with: {_resume_command(directory)}")
        raise
    finally:
        bar.close()
        log.close()
        _draw(directory, baselines, say)
    model = merge_lora(config.precision.cast_compute(eqx.combine(state.arrays, static)))
    if sample is not None and config.train.sample_tokens:
        say(sample(model, config, vocabulary, state.key))
    return Result(directory, model, bits, baselines["Markov, order 2"], baselines["gzip -9"])


def _read(
    config: Config, text: Sequence[str | Path], checkpoint: Checkpoint | None
) -> tuple[list[Document], list[Document], str, str]:
    """Training and validation documents, the fingerprint of all, and a sentence that says how they are used."""
    documents = read_documents(text) if text else standard_library()
    text_hash = fingerprint(documents)
    if checkpoint is not None and checkpoint.field("data.fingerprint", str) != text_hash:
        raise ValueError(
            f"checkpoint: `{checkpoint.folder}` was written on other text than what is under "
            f"{', '.join(map(str, text)) or 'the standard library'} now; give that text with --text, or start a new run"
        )
    training, validation = split_documents(
        documents, config.data.validation_fraction, config.data.validation_bytes or None
    )
    return training, validation, text_hash, describe_split(documents, training, validation)


def _beginning(documents: Sequence[Document]) -> list[Document]:
    """Whole documents of `_MARKOV_BYTES` together at most; of a first one that is longer, its beginning."""
    sizes = itertools.accumulate(len(document.data) for document in documents)
    whole = [document for document, size in zip(documents, sizes) if size <= _MARKOV_BYTES]
    return whole or [documents[0]._replace(data=documents[0].data[:_MARKOV_BYTES])]


def _forgetting(documents: list[Document]) -> Iterator[Document]:
    """The documents in order, each leaving the list."""
    documents.reverse()
    while documents:
        yield documents.pop()


def _init(config: Config, make_model: Callable[[Config, jax.Array], Any]) -> tuple[TrainState, Any, Any]:
    key, model_key = jax.random.split(jax.random.key(config.train.seed))
    model = config.precision.cast_parameters(make_model(config, model_key))
    model = adapt(model, config.lora, key=jax.random.fold_in(model_key, 1))
    return init_state(model, lambda arrays: make_optimiser(config.optimiser, config.train.steps, arrays), key=key)


def _parameters(state: TrainState) -> str:
    def count(tree: Any) -> str:
        size = sum(x.size for x in jax.tree.leaves(tree))
        return f"{size / 1e6:.2f} M" if size >= 1e5 else f"{size:,}"

    trained = count(state.parameters)
    return f"{trained} parameters" if state.frozen is None else f"{trained} of {count(state.arrays)} parameters"


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


def _due(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _owes_validation(config: Config, log: Log, step: int) -> bool:
    """Whether the validation of the step that a run goes on from is missing: it was stopped before or in it."""
    due = 0 < step < config.train.steps and _due(config.train.validate_every, step)
    return due and not any(r["step"] == step and "validation_bits_per_byte" in r for r in log.records)


def _evaluate(
    evaluate: Callable, state: TrainState, config: Config, corpus: Corpus, stop: StopRequest, limit: int | None = None
) -> float | None:
    """Bits per byte of the first `limit` batches of validation text, or of all; None after a request to stop."""
    nats, tokens, in_bytes = 0.0, 0, 0
    batches = validation_batches(corpus, config.data.row_length, config.data.batch_size)
    for batch in itertools.islice(batches, limit):
        if stop:
            return None
        sums = evaluate(state.arrays, batch)
        wait_for(sums)
        sums = jax.device_get(sums)
        nats, tokens, in_bytes = nats + float(sums.nats), tokens + int(sums.tokens), in_bytes + int(sums.bytes)
    size = tokens * corpus.num_bytes / corpus.num_tokens if config.data.tokenizer else in_bytes
    return nats / math.log(2) / size


def _validate_all(
    evaluate: Callable,
    state: TrainState,
    config: Config,
    corpus: Corpus,
    stop: StopRequest,
    say: Callable[[str], None],
) -> float | None:
    """Bits per byte of the whole validation text, with a notice before and after; None after a request to stop."""
    say(f"validating on all {corpus.num_bytes:,} bytes of validation text")
    start = time.perf_counter()
    bits = _evaluate(evaluate, state, config, corpus, stop)
    if bits is not None:
        say(f"validated in {time.perf_counter() - start:.1f} s")
    return bits


def _finite(bits: float, step: int, directory: Path) -> float:
    if not math.isfinite(bits):
        raise diverged(f"bits per byte of the validation text are {bits}", step, directory)
    return bits


def _resume_command(directory: Path) -> str:
    return f"deltanox train --resume {shlex.quote(str(directory))}"


def _stopped(stop: StopRequest, step: int, config: Config, directory: Path) -> TrainingStopped:
    assert stop.signal is not None
    left = (
        "its final validation is left" if step == config.train.steps else f"{config.train.steps - step} steps are left"
    )
    return TrainingStopped(
        f"stopped at step {step}, which is saved; {left}; go on with: {_resume_command(directory)}", stop.signal
    )


def _draw(directory: Path, baselines: dict[str, float], say: Callable[[str], None]) -> None:
    """The picture of the log. Without it a run is as good: what goes wrong here is said, and no more."""
    writing = beside(directory / PICTURE)
    try:
        marks = {("gzip -9, file by file" if name == "gzip -9" else name): bits for name, bits in baselines.items()}
        plot_losses(read_log(directory / LOG), marks, writing)
        writing.replace(directory / PICTURE)
    except Exception as error:
        reason = sentence(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        say(f"no picture of the losses was drawn: {reason}")
    finally:
        with contextlib.suppress(OSError):
            writing.unlink(missing_ok=True)


def _balance_loss(stats: Any) -> jax.Array:
    from deltanox.nn import load_balance_loss

    return load_balance_loss(stats)
