"""The folder of a run, new or going on, and what is written there once: arrays that are not trained, a tokenizer."""

import contextlib
import itertools
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from deltanox._oserror import expand_home, naming
from deltanox.train._checkpoint import Checkpoint, clear_leftovers, find_checkpoint, load_arrays, save_checkpoint
from deltanox.train._lock import RunIsOpen, lock
from deltanox.train._settings import Config
from deltanox.train._vocabulary import BYTES, Vocabulary, read_vocabulary

Tree = TypeVar("Tree")

FROZEN, TOKENIZER = "frozen", "tokenizer"
"""Folders in a run's folder, of what is written once."""

CHECKPOINTS, LOG, PICTURE = "checkpoints", "log.jsonl", "loss.png"
RUN_ID = "run_id"
"""A file with a random number, which every checkpoint of the run holds too."""


def find_run(resume: str | Path) -> Checkpoint:
    """The checkpoint that a run goes on from.

    **Raises**: `ValueError` where there is none, where it is damaged, not the newest one, or of another run.
    """
    checkpoint = find_checkpoint(resume)
    newest = find_checkpoint(checkpoint.folder.parent)
    if newest.folder != checkpoint.folder:
        raise ValueError(
            f"checkpoint: `{newest.folder.name}` is newer than `{checkpoint.folder}`; give the run's folder, or "
            "delete the newer checkpoints first"
        )
    path = checkpoint.folder.parent.parent / RUN_ID
    here, written = (
        path.read_text("utf-8", "replace").strip() if path.exists() else "",
        checkpoint.field("run", str | None, default=None),
    )
    if here and here != written:
        raise ValueError(
            f"checkpoint: `{checkpoint.folder}` belongs to another run than `{path.parent}` (its number is {written}, "
            f"`{path}` says {here}); resume it in the folder of its own run, or delete it here"
        )
    return checkpoint


@contextlib.contextmanager
def resumed_run(resume: str | Path) -> Iterator[Checkpoint]:
    """The checkpoint that a run goes on from, while this process alone may write to the run's folder.

    **Raises**: as `find_run`, and where another process has the run open.
    """
    directory = find_run(resume).folder.parent.parent
    with lock(directory):
        _clear(directory)
        yield find_run(resume)


@contextlib.contextmanager
def new_run(config: Config, name: str) -> Iterator[Path]:
    """The folder of a new run, while this process alone may write to it: the config's, where no run may be, or the
    first free one of runs/name, runs/name-2 ...

    **Raises**: `ValueError` where the config's holds a run, is a file, or another process has it open.
    """
    if config.train.directory:
        path = expand_home(config.train.directory)
        if path.exists() and not path.is_dir():
            raise ValueError(
                f"train.directory: `{path}` must be a folder or a new name, but it is a file: give another"
            )
        with _claim(path):
            if not _free(path):
                raise ValueError(
                    f"train.directory: `{path}` holds a run already; resume with --resume {path}, or give another "
                    "folder"
                )
            yield path
        return
    for path in (Path("runs", n) for n in itertools.chain([name], (f"{name}-{i}" for i in itertools.count(2)))):
        if not _free(path):
            continue
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(_claim(path))
            except RunIsOpen:
                continue
            if _free(path):
                yield path
                return


def _free(path: Path) -> bool:
    return not (path / LOG).exists() and not any(path.glob(f"{CHECKPOINTS}/step_*"))


@contextlib.contextmanager
def _claim(path: Path) -> Iterator[None]:
    with naming(path):
        path.mkdir(parents=True, exist_ok=True)
    with lock(path):
        _clear(path)
        yield


def _clear(directory: Path) -> None:
    """Remove what a process that was killed while writing left behind."""
    for folder in (directory / CHECKPOINTS, directory / FROZEN):
        clear_leftovers(folder)
    for name in (LOG, PICTURE):
        beside(directory / name).unlink(missing_ok=True)


def beside(path: Path) -> Path:
    """Where a file is written before it takes the place of `path`, which is never half written."""
    return path.with_name(f".writing_{path.name}")


def identify(directory: Path, checkpoint: Checkpoint | None) -> str | None:
    """The number of a run, new or that of its checkpoint, written into the run's folder if it is not there."""
    run = secrets.token_hex(8) if checkpoint is None else checkpoint.field("run", str | None, default=None)
    path = directory / RUN_ID
    if run is not None and (checkpoint is None or not path.exists()):
        with naming(path):
            path.write_text(f"{run}\n", "utf-8")
    return run


def save_frozen(directory: Path, frozen: Any) -> str:
    """Write the arrays that are not trained, once a run, and return their hash."""
    folder = save_checkpoint(directory / FROZEN, frozen, 0, {}, keep=1, finite=True)
    return find_checkpoint(folder).field("arrays.sha256", str)


def load_frozen(checkpoint: Checkpoint, like: Tree) -> Tree:
    """The arrays of `save_frozen` beside a checkpoint.

    **Raises**: `ValueError` where they are missing, damaged, or not those that the checkpoint was written with.
    """
    if like is None:
        return like
    found = find_checkpoint(checkpoint.folder.parent.parent / FROZEN)
    if found.field("arrays.sha256", str) != checkpoint.field("frozen", str):
        raise ValueError(
            f"checkpoint: `{found.folder}` does not hold the weights that `{checkpoint.folder}` changes; put back the "
            "folder `frozen` of that run"
        )
    return load_arrays(found, like)


def run_vocabulary(config: Config, checkpoint: Checkpoint | None) -> Vocabulary:
    """What a run's text is made of: bytes, or the tokens of the config's tokenizer, which a run keeps in its folder.

    **Raises**: `ValueError` for a tokenizer that is missing, of a larger vocabulary than the model, or not the run's.
    """
    if not config.data.tokenizer:
        return BYTES
    if checkpoint is None:
        found = read_vocabulary(expand_home(config.data.tokenizer), name=config.data.end_token)
        if found.size > config.model.vocab_size:
            raise ValueError(
                f"data.tokenizer: `{config.data.tokenizer}` has tokens up to {found.size - 1}, but model.vocab_size is "
                f"{config.model.vocab_size}: give the model's own tokenizer, or a model at least as large"
            )
        return found
    end, sha256 = checkpoint.field("data.tokenizer.end", int), checkpoint.field("data.tokenizer.sha256", str)
    found = read_vocabulary(checkpoint.folder.parent.parent / TOKENIZER, end=end)
    if found.sha256 != sha256:
        raise ValueError(
            f"checkpoint: the tokenizer in `{found.folder}` is not the one that `{checkpoint.folder}` was written "
            "with; put that back"
        )
    return found
