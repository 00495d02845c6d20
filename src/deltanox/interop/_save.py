"""A model to a checkpoint's folder."""

import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .._oserror import safetensors_errors
from .._read import member
from ..models import HybridLM, Qwen3_5Config
from ..ops._validate import describe, require
from ._config import CONFIG, config_to_hf, read_json
from ._files import DTYPES, INDEX, SINGLE, Checkpoint, shards, write_json, write_shard
from ._load import check, floating_dtype, make_skeleton
from ._names import Layout, Names, Part, places

_COPIED = (".json", ".jinja", ".txt", ".model")  # tokenizer, chat template, generation settings


class _Source(NamedTuple):
    """A part of a tensor that is to be written: of `array`, in its `period` if that isn't None."""

    array: jax.Array
    period: int | None
    part: Part


class _Tensor(NamedTuple):
    shape: tuple[int, ...]
    dtype: np.dtype
    sources: list[_Source]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def save(
    model: HybridLM,
    config: Qwen3_5Config,
    folder: str | Path,
    *,
    like: str | Path | None = None,
    dtype: DTypeLike | None = None,
    end_token: int | None = None,
    shard_bytes: int = 2 * 2**30,
) -> None:
    """Write a model as a Hugging Face checkpoint, which transformers and `load` read.

    Alone, it is a text model's checkpoint in the layout of the releases: `config.json`, and every array in its own
    dtype (decay rates and gated norms are float32). With `like`, it is the checkpoint in that folder with the model's
    weights in the place of its own: its prefixes, layout, dtypes and `config.json`, its tensors that the model doesn't
    hold (vision, `mtp.*` if they weren't loaded), its tokenizer. Weights that were loaded and not changed come out
    byte by byte then.

    **Arguments:** `model`, `config`: as from `load`; `folder`: made, must be empty; `like`: see above; `dtype`: of the
    weights, but for those that stay float32; `end_token`: number of the token that ends a text, which `config.json`
    names beside those of `like`; `shard_bytes`: of a file, which is what the host holds at a time.

    **Raises:** `ValueError` for a folder that isn't empty, a model that isn't of the config, a `like` of another model.
    """
    folder = Path(folder)
    dtype = None if dtype is None else floating_dtype("save", dtype)
    require(
        not folder.exists() or (folder.is_dir() and not any(folder.iterdir())),
        f"save: `{folder}` must be a new or an empty folder: give another one, or delete what is in it",
    )
    skeleton = make_skeleton(config, jnp.float32 if dtype is None else dtype)
    _check_model(model, skeleton)
    if like is None:
        source, names, layout = None, Names(), Layout.of_config(config)
        written = config_to_hf(config, dtype=jnp.dtype(model.embedding.dtype if dtype is None else dtype).name)
    else:
        source = Checkpoint(Path(like))
        names, layout = Names.of(source.tensors, like), Layout.of_names(source.tensors)
        check(source, names, config, places(config, skeleton, layout))
        written = _with_dtype(read_json(source.folder), dtype)
    written = _with_end(written, end_token)

    copied = [] if source is None else [
        member(source.folder, path.name)
        for path in sorted(source.folder.iterdir())
        if path.suffix in _COPIED and path.name not in (CONFIG, INDEX) and path.is_file()
    ]  # fmt: skip
    tensors = _tensors(model, config, skeleton, names, layout, source, dtype)
    others: dict[str, np.ndarray] = {}
    if source is not None:
        tied = names("lm_head.weight") if config.tied_head else None
        others = {name: source.view(name) for name in source.tensors if name not in tensors and name != tied}

    folder.mkdir(parents=True, exist_ok=True)
    _write(folder, tensors, others, shard_bytes)
    for path in copied:
        shutil.copyfile(path, folder / path.name)
    write_json(folder / CONFIG, written)  # last: without it the folder is no checkpoint


def _tensors(model, config, skeleton, names, layout, source, dtype) -> dict[str, _Tensor]:
    """What the model's arrays are in the checkpoint; `source` is the one that it shall be like, or None."""
    tensors: dict[str, _Tensor] = {}
    for place, abstract in zip(places(config, model, layout), jax.tree.leaves(skeleton)):
        kept = abstract.dtype != skeleton.embedding.dtype  # float32 whatever the weights are
        for period, parts in enumerate(place.periods):
            for part in parts:
                name = names(part.tensor)
                if dtype is not None and not kept:
                    stored = np.dtype(abstract.dtype)
                else:
                    stored = np.dtype(place.array.dtype) if source is None else DTYPES[source.tensors[name].dtype]
                tensor = tensors.setdefault(name, _Tensor(part.shape, stored, []))
                tensor.sources.append(_Source(place.array, period if place.stacked else None, part))
    return tensors


def _write(folder: Path, tensors: dict[str, _Tensor], others: dict[str, np.ndarray], shard_bytes: int) -> None:
    """The files: one, or shards and their index."""
    sizes = {name: x.size for name, x in tensors.items()} | {name: x.nbytes for name, x in others.items()}
    files = shards(sizes, shard_bytes)
    weight_map, host = {}, _Host()
    for i, members in enumerate(files):
        file = SINGLE if len(files) == 1 else f"model-{i + 1:05d}-of-{len(files):05d}.safetensors"
        values = {name: _value(tensors[name], host) if name in tensors else others[name] for name in members}
        with safetensors_errors(folder / file):
            write_shard(folder / file, values)
        weight_map |= dict.fromkeys(members, file)
    if len(files) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})


def _check_model(model: HybridLM, skeleton: HybridLM) -> None:
    def described(tree):
        leaves = jax.tree_util.tree_leaves_with_path(tree)
        return {jax.tree_util.keystr(path): x for path, x in leaves}

    have, want = described(model), described(skeleton)
    for path in sorted(have.keys() | want.keys()):
        a, b = have.get(path), want.get(path)
        require(
            a is not None and b is not None and a.shape == b.shape,
            f"save: `model` must be the model of `config`, but its `{path}` is "
            f"{'missing' if a is None else describe(a)} where the config has "
            f"{'none' if b is None else list(b.shape)}: give the config that it was made with, and what merge_lora "
            "returns",
        )


def _with_dtype(raw: dict[str, Any], dtype: DTypeLike | None) -> dict[str, Any]:
    if dtype is not None:
        for table in (raw, raw.get("text_config")):
            for name in ("dtype", "torch_dtype"):
                if isinstance(table, dict) and name in table:
                    table[name] = jnp.dtype(dtype).name
    return raw


def _with_end(raw: dict[str, Any], end_token: int | None) -> dict[str, Any]:
    """`raw` with `end_token` among its end tokens."""
    ends = raw.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if end_token is None or end_token in ends:
        return raw
    ends = [*ends, end_token]
    return raw | {"eos_token_id": ends if len(ends) > 1 else end_token}


class _Host:
    """Layers of arrays on the host; the last few are kept, since experts are written one by one."""

    def __init__(self):
        self.kept: dict[tuple[int, int | None], np.ndarray] = {}

    def __call__(self, array: jax.Array, period: int | None) -> np.ndarray:
        key = (id(array), period)
        if key not in self.kept:
            while len(self.kept) > 3:
                del self.kept[next(iter(self.kept))]
            self.kept[key] = np.asarray(array if period is None else array[period])
        return self.kept[key]


def _value(tensor: _Tensor, host: _Host) -> np.ndarray:
    out = np.empty(tensor.shape, tensor.dtype)
    for array, period, part in tensor.sources:
        layer = host(array, period)
        target = out if part.of_tensor is None else part.of_tensor(out)
        target[...] = layer if part.of_array is None else part.of_array(layer)
    return out
