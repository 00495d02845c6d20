"""The training loop: from a config to a trained model, with a log, checkpoints, a picture and what it is worth."""

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
from tqdm import tqdm

from deltanox import _console as console
from deltanox.nn import merge_lora
from deltanox.train._adapt import adapt
from deltanox.train._baselines import archive_bits_per_byte, gzip_bits_per_byte, markov_bits_per_byte
from deltanox.train._checkpoint import Checkpoint, load_arrays, save_checkpoint
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
    TOKENIZER,
    find_run,
    load_frozen,
    new_directory,
    run_vocabulary,
    save_frozen,
)
from deltanox.train._log import Log, read_log
from deltanox.train._optimiser import learning_rate_schedule, make_optimiser
from deltanox.train._plot import plot_losses
from deltanox.train._report import Report
from deltanox.train._settings import Config
from deltanox.train._step import TrainState, init_state, make_evaluation, make_step, repeat_step
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

    **Raises**: `ValueError` for what does not fit together (text, tokenizer, config, checkpoint); `TrainingDiverged`.
    """
    checkpoint = None if resume is None else find_run(resume)
    if checkpoint is not None:
        changed = differences(checkpoint.record["config"], config_to_dict(config))
        if changed:
            raise ValueError(
                f"checkpoint: `{checkpoint.folder}` was written with another config ({'; '.join(changed)}); resume "
                "with the config it was written with, or start a new run"
            )
        text = text or checkpoint.record["data"]["text"]
    vocabulary = run_vocabulary(config, checkpoint)
    training, validation, text_hash, used = _read(config, text, checkpoint)
    say(used)
    directory = new_directory(config, name) if checkpoint is None else checkpoint.folder.parent.parent
    directory.mkdir(parents=True, exist_ok=True)

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
        position, first_step = DataPosition(*checkpoint.record["data"]["position"]), checkpoint.record["step"]

    epoch_steps = data.batches_per_epoch / config.train.accumulation
    tokens = "" if vocabulary.text is None else f" ({data.corpus.num_tokens / 1e6:.2f} M tokens)"
    say(
        f"{_parameters(state)}; {size_in_words(data.corpus.num_bytes)} of text{tokens} for training "
        f"in {len(data.corpus.sizes)} documents, {size_in_words(held_out.num_bytes)} for validation in "
        f"{len(held_out.sizes)}; {config.train.steps} steps are {config.train.steps / epoch_steps:.2f} epochs; "
        f"{directory}"
    )
    record: dict[str, Any] = {"config": config_to_dict(config)}
    in_data: dict[str, Any] = {"fingerprint": text_hash, "text": [str(Path(path).resolve()) for path in text]}
    if vocabulary.text is not None:
        in_data["tokenizer"] = {"sha256": vocabulary.sha256, "end": vocabulary.end}
    if checkpoint is not None and state.frozen is not None:
        record["frozen"] = checkpoint.record["frozen"]

    def save(step: int) -> None:
        save_checkpoint(
            directory / "checkpoints",
            state._replace(frozen=None),
            step,
            record | {"data": {"position": list(position), **in_data}},
            keep=config.train.keep_checkpoints,
        )

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
    start = time.perf_counter()
    step_function = jax.jit(step_function, donate_argnums=0).lower(state, batches, np.int32(1)).compile()
    say(f"compiled the step in {time.perf_counter() - start:.1f} s")
    evaluate = jax.jit(make_evaluation(static, config.precision))

    log = Log(directory / "log.jsonl", step=first_step)
    bar = tqdm(total=config.train.steps, initial=first_step, unit="step", disable=not progress, dynamic_ncols=True)
    report = Report(log, bar, batches.tokens[0].size, directory)
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
                bits = _evaluate(evaluate, state, config, held_out, limit=config.train.validation_batches)
                log.write(step=step, validation_bits_per_byte=bits)
                report.restart()
        bar.close()
        start = time.perf_counter()
        bits = _evaluate(evaluate, state, config, held_out)
        first = {}
        if config.train.validate_every:  # the measure of the short validations, so that they have an end
            few = _evaluate(evaluate, state, config, held_out, limit=config.train.validation_batches)
            first = {"first_batches_bits_per_byte": few}
        log.write(step=config.train.steps, validation_bits_per_byte=bits, baselines=baselines, **first)
        say(
            f"validation, bits per byte: model {bits:.4f}, Markov model of order 2 {baselines['Markov, order 2']:.4f}, "
            f"gzip -9 {baselines['gzip -9']:.4f} file by file, {archives[0]:.4f} in one archive, xz -9 in one archive "
            f"{archives[1]:.4f} ({time.perf_counter() - start:.1f} s)"
        )
    except KeyboardInterrupt:
        bar.close()
        say(f"stopped; go on from the newest checkpoint with: deltanox train --resume {directory}")
        raise
    finally:
        bar.close()
        log.close()
        marks = {("gzip -9, file by file" if name == "gzip -9" else name): bits for name, bits in baselines.items()}
        plot_losses(read_log(directory / "log.jsonl"), marks, directory / "loss.png")
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
    if checkpoint is not None and checkpoint.record["data"]["fingerprint"] != text_hash:
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


def _evaluate(evaluate: Callable, state: TrainState, config: Config, corpus: Corpus, limit: int | None = None) -> float:
    """Bits per byte of the first `limit` batches of validation text, or of all."""
    nats, tokens, in_bytes = 0.0, 0, 0
    batches = validation_batches(corpus, config.data.row_length, config.data.batch_size)
    for batch in itertools.islice(batches, limit):
        sums = jax.device_get(evaluate(state.arrays, batch))
        nats, tokens, in_bytes = nats + float(sums.nats), tokens + int(sums.tokens), in_bytes + int(sums.bytes)
    size = tokens * corpus.num_bytes / corpus.num_tokens if config.data.tokenizer else in_bytes
    return nats / math.log(2) / size


def _balance_loss(stats: Any) -> jax.Array:
    from deltanox.nn import load_balance_loss

    return load_balance_loss(stats)
