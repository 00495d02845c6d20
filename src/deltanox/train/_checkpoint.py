"""Checkpoints: a folder with a safetensors file of all arrays and a JSON file of everything else.

    step_00000200/arrays.safetensors      parameters, optimiser, step, PRNG key data
    step_00000200/checkpoint.json         format, step, data position and fingerprint, config, size and hash of the
    arrays, hash of all this

Both are written into a folder beside, flushed to the disk, and the folder is renamed: a name `step_...` stands for a
complete checkpoint whenever the process is killed, and the one before stays until the new one is there.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import safetensors
from safetensors.numpy import save

from deltanox._oserror import expand_home, naming
from deltanox._read import field, read_json_file

Tree = TypeVar("Tree")

FORMAT = "deltanox checkpoint"
VERSION = 2
"""Of the format. 1, which is read as well, had no hash of the record."""
_ARRAYS, _RECORD = "arrays.safetensors", "checkpoint.json"
_NAME = re.compile(r"step_(\d{8,})")
_WRITING, _OLD = ".writing_", ".old_"

_DTYPES = {
    "BF16": ml_dtypes.bfloat16,
    "F16": np.float16,
    "F32": np.float32,
    "F64": np.float64,
    "BOOL": np.bool_,
    **{
        f"{letter}{bits}": np.dtype(f"{kind}{bits}")
        for letter, kind in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
}


class Checkpoint(NamedTuple):
    """A checkpoint on the disk: its folder, and its record (a dictionary with `step`, `config`, `data` and so on)."""

    folder: Path
    record: dict[str, Any]

    def field(self, name: str, kind: Any, **default: Any) -> Any:
        """What the record says in a field, "data.text" for one in a table.

        **Raises**: `ValueError` where it is missing or of another kind.
        """
        return field(
            f"checkpoint: `{self.folder / _RECORD}`", self.record, name, kind, remedy=_remedy(self.folder), **default
        )


class NonFinite(ValueError):
    """An array that was to be saved has values that are NaN or infinite."""


def save_checkpoint(
    directory: str | Path, tree: Any, step: int, record: dict[str, Any], *, keep: int = 2, finite: bool = False
) -> Path:
    """Write the arrays of `tree` and `record` as the checkpoint of `step`, then delete all but the newest `keep`.

    **Arguments**: `directory`, made if it does not exist; `tree`, any PyTree of arrays and PRNG keys (bfloat16 as
    well); `step`; `record`, values that JSON can hold; `finite`, whether every value must be a finite number.

    **Returns**: the checkpoint's folder.

    **Raises**: `NonFinite`, and nothing is written; `OSError` with the path, and what was written is removed: the
    checkpoints that were there before stay.
    """
    directory = Path(directory)
    with naming(directory):
        directory.mkdir(parents=True, exist_ok=True)
        clear_leftovers(directory)
    arrays, keys = _arrays(tree)
    if finite:
        _require_finite(arrays)
    data = save(arrays)
    full = {
        "format": FORMAT,
        "version": VERSION,
        "step": step,
        **record,
        "keys": keys,
        "arrays": {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()},
    }
    full["sha256"] = _record_hash(full)
    writing, folder = directory / f"{_WRITING}{os.getpid()}", directory / f"step_{step:08d}"
    try:
        with naming(folder):
            writing.mkdir()
            _write(writing / _ARRAYS, data)
            _write(writing / _RECORD, (json.dumps(full, indent=1) + "\n").encode())
            _flush(writing)
            if folder.exists():  # the same step again: a run that was resumed from an earlier checkpoint
                folder.rename(directory / f"{_OLD}{folder.name}")
            writing.rename(folder)
            _flush(directory)
    except OSError:
        with contextlib.suppress(OSError):
            clear_leftovers(directory)
        raise
    clear_leftovers(directory)
    for old in _folders(directory)[keep:]:
        shutil.rmtree(old, ignore_errors=True)
    return folder


def clear_leftovers(directory: Path) -> None:
    """Remove what a save that was killed, or that failed, left in `directory`."""
    for left in directory.glob(f"{_WRITING}*"):
        shutil.rmtree(left, ignore_errors=True)
    for old in directory.glob(f"{_OLD}*"):
        folder = directory / old.name.removeprefix(_OLD)
        if folder.exists():
            shutil.rmtree(old, ignore_errors=True)
        else:  # killed between two renamings: the replacement is not there
            old.rename(folder)


def _require_finite(arrays: dict[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        if jnp.issubdtype(array.dtype, jnp.inexact) and (bad := int(np.size(array) - np.isfinite(array).sum())):
            raise NonFinite(f"array `{name}` has {bad} values of {array.size} that are not finite")


def _record_hash(record: dict[str, Any]) -> str:
    """Of all fields but the hash itself, in one order and without white space."""
    rest = {name: value for name, value in record.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(json.loads(json.dumps(rest)), sort_keys=True).encode()).hexdigest()


def _write(path: Path, data: bytes) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _flush(folder: Path) -> None:
    """Make the names in a folder durable, where the platform can (not on Windows)."""
    if hasattr(os, "O_DIRECTORY"):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _folders(directory: Path) -> list[Path]:
    """The checkpoints under `directory`, newest first."""
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def find_checkpoint(directory: str | Path) -> Checkpoint:
    """The newest checkpoint under `directory`: a run's folder, its `checkpoints`, or one checkpoint itself.

    **Raises**: `ValueError` where there is none, or where the newest one isn't a checkpoint of this library.
    """
    directory = expand_home(directory)
    if not directory.is_dir():
        raise ValueError(
            f"checkpoint: there is no folder `{directory}`; give the folder of a run, such as runs/qwen3_5_nano"
        )
    if (directory / _RECORD).is_file() or _NAME.fullmatch(directory.name):
        return Checkpoint(directory, _read_record(directory))
    for parent in (directory / "checkpoints", directory):
        if parent.is_dir() and (folders := _folders(parent)):
            return Checkpoint(folders[0], _read_record(folders[0]))
    raise ValueError(
        f"checkpoint: no checkpoint under `{directory}`; give the folder of a run, or start one without --resume"
    )


def _remedy(folder: Path) -> str:
    others = [path for path in _folders(folder.parent) if path != folder]
    if others:
        return f"delete this folder to go on from {others[0].name}"
    return "delete the run's folder and start again"


def _read_record(folder: Path) -> dict[str, Any]:
    try:
        record = read_json_file(folder / _RECORD, "")
    except PermissionError:
        raise
    except (OSError, ValueError):
        raise ValueError(
            f"checkpoint: `{folder}` has no readable {_RECORD}, so it is damaged or of another program; "
            f"{_remedy(folder)}"
        ) from None
    if record.get("format") != FORMAT:
        raise ValueError(f"checkpoint: `{folder}` was not written by deltanox; give a folder of `deltanox train`")
    if record.get("version") not in (1, VERSION):
        raise ValueError(
            f"checkpoint: `{folder}` has version {record.get('version')!r} of the format, this deltanox reads 1 and "
            f"{VERSION}; read it with the deltanox that wrote it"
        )
    if record["version"] > 1 and record.get("sha256") != _record_hash(record):
        raise ValueError(
            f"checkpoint: `{folder / _RECORD}` was changed after it was written: its hash is not the recorded one; "
            f"undo the change, or {_remedy(folder)}"
        )
    step = Checkpoint(folder, record).field("step", int)
    if (match := _NAME.fullmatch(folder.name)) and step != int(match[1]):
        raise ValueError(
            f"checkpoint: `{folder}` holds step {step}, not that of its name; give it the name it had, "
            f"or {_remedy(folder)}"
        )
    return record


def load_arrays(checkpoint: Checkpoint, like: Tree, *, prefix: str = "") -> Tree:
    """The arrays of a checkpoint in the structure of `like`.

    **Arguments**: `checkpoint`; `like`, a tree of arrays or `jax.ShapeDtypeStruct`s (`eqx.filter_eval_shape` makes
    one without memory); `prefix`, where `like` lies inside the tree that was saved, such as ".parameters": only those
    arrays are looked at. With prefix "" every array of the checkpoint must have its place in `like`.

    **Raises**: `ValueError` for an incomplete or damaged file, and for arrays whose names, shapes or dtypes do not
    match.
    """
    folder = checkpoint.folder
    size, sha256 = checkpoint.field("arrays.bytes", int), checkpoint.field("arrays.sha256", str)
    keys = checkpoint.field("keys", dict[str, str])
    try:
        data = (folder / _ARRAYS).read_bytes()
    except PermissionError:
        raise
    except OSError:
        raise ValueError(f"checkpoint: `{folder}` has no {_ARRAYS}; {_remedy(folder)}") from None
    if len(data) != size:
        raise ValueError(
            f"checkpoint: `{folder / _ARRAYS}` is truncated or foreign: it has {len(data)} bytes instead of "
            f"{size}; {_remedy(folder)}"
        )
    if hashlib.sha256(data).hexdigest() != sha256:
        raise ValueError(
            f"checkpoint: `{folder / _ARRAYS}` is damaged: its hash is not the recorded one; {_remedy(folder)}"
        )
    stored = {
        name: np.frombuffer(view["data"], _DTYPES[view["dtype"]]).reshape(view["shape"])
        for name, view in safetensors.deserialize(data)
    }
    used = set()

    def restore(path, leaf):
        name = prefix + jax.tree_util.keystr(path)
        used.add(name)
        if name not in stored:
            raise ValueError(f"checkpoint: `{folder}` has no array `{name}`: {_MISMATCH}")
        array, wanted = stored[name], jax.eval_shape(_plain, leaf)
        if (array.shape, array.dtype) != (wanted.shape, wanted.dtype):
            raise ValueError(
                f"checkpoint: in `{folder}` the array `{name}` is {array.dtype.name}{list(array.shape)}, this run "
                f"needs {wanted.dtype.name}{list(wanted.shape)}: {_MISMATCH}"
            )
        value = jnp.array(array)  # a copy: the file's bytes go, and a step may overwrite what it is given
        if name in keys:
            with contextlib.suppress(ValueError, TypeError):  # no such implementation, or of keys of another size
                value = jax.random.wrap_key_data(value, impl=keys[name])
        if value.dtype != leaf.dtype:
            raise ValueError(
                f"checkpoint: in `{folder}` the array `{name}` is of {keys.get(name, 'no')} keys, this run needs "
                f"{leaf.dtype}: {_MISMATCH}"
            )
        return value

    tree = jax.tree_util.tree_map_with_path(restore, like)
    unused = [] if prefix else sorted(stored.keys() - used)
    if unused:
        raise ValueError(
            f"checkpoint: `{folder}` has an array `{unused[0]}` that this run has no place for: {_MISMATCH}"
        )
    return tree


_MISMATCH = "it was written with another config; give the config that it was written with"


def _plain(leaf):
    return jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf


def _arrays(tree: Any) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The arrays of a tree by the path to them, and the implementation of those that are PRNG keys."""
    arrays, keys = {}, {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            keys[name] = str(jax.random.key_impl(leaf))
        # 0-d arrays stay 0-d: `ascontiguousarray` would make them one-dimensional
        arrays[name] = np.asarray(jax.device_get(_plain(leaf)), order="C")
    return arrays, keys
