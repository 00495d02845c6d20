"""The folder of a run, new or going on, and what is written there once: arrays that are not trained, a tokenizer."""

import itertools
from pathlib import Path
from typing import Any, TypeVar

from deltanox.train._checkpoint import Checkpoint, find_checkpoint, load_arrays, save_checkpoint
from deltanox.train._settings import Config
from deltanox.train._vocabulary import BYTES, Vocabulary, read_vocabulary

Tree = TypeVar("Tree")

FROZEN, TOKENIZER = "frozen", "tokenizer"
"""Folders in a run's folder, of what is written once."""


def find_run(resume: str | Path) -> Checkpoint:
    checkpoint = find_checkpoint(resume)
    newest = find_checkpoint(checkpoint.folder.parent)
    if newest.folder != checkpoint.folder:
        raise ValueError(
            f"checkpoint: `{newest.folder.name}` is newer than `{checkpoint.folder}`; give the run's folder, or "
            "delete the newer checkpoints first"
        )
    return checkpoint


def new_directory(config: Config, name: str) -> Path:
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


def save_frozen(directory: Path, frozen: Any) -> str:
    """Write the arrays that are not trained, once a run, and return their hash."""
    return find_checkpoint(save_checkpoint(directory / FROZEN, frozen, 0, {}, keep=1)).record["arrays"]["sha256"]


def load_frozen(checkpoint: Checkpoint, like: Tree) -> Tree:
    """The arrays of `save_frozen` beside a checkpoint.

    **Raises**: `ValueError` where they are missing, damaged, or not those that the checkpoint was written with.
    """
    if like is None:
        return like
    found = find_checkpoint(checkpoint.folder.parent.parent / FROZEN)
    if found.record["arrays"]["sha256"] != checkpoint.record.get("frozen"):
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
        found = read_vocabulary(config.data.tokenizer, name=config.data.end_token)
        if found.size > config.model.vocab_size:
            raise ValueError(
                f"data.tokenizer: `{config.data.tokenizer}` has tokens up to {found.size - 1}, but model.vocab_size is "
                f"{config.model.vocab_size}: give the model's own tokenizer, or a model at least as large"
            )
        return found
    known = checkpoint.record["data"]["tokenizer"]
    found = read_vocabulary(checkpoint.folder.parent.parent / TOKENIZER, end=known["end"])
    if found.sha256 != known["sha256"]:
        raise ValueError(
            f"checkpoint: the tokenizer in `{found.folder}` is not the one that `{checkpoint.folder}` was written "
            "with; put that back"
        )
    return found
