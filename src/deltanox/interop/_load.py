"""A checkpoint's folder to a model."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from ..models import HybridLM, Qwen3_5Config, qwen3_5
from ..ops._validate import require
from ._config import config_from_hf, read_json
from ._files import DTYPES, Checkpoint, first
from ._names import Layout, Names, Part, Place, places

_ALIGNMENT = 64  # of an array that JAX takes over on a CPU, instead of copying it


def load(
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    mtp: bool | None = None,
    sharding: Sharding | Callable[[str, jax.ShapeDtypeStruct], Sharding] | None = None,
    **options: Any,
) -> tuple[HybridLM, Qwen3_5Config]:
    """A model with the weights of a Hugging Face checkpoint of Qwen3-Next, Qwen3.5 or Qwen3.5 MoE (its text part).

    Read are fused and split projections, packed experts and experts each by themselves, one file or shards, with or
    without the prefixes of a model with images, whose vision tensors are passed over. The host holds at most what was
    loaded already and the largest tensor, in the target dtype.

    **Arguments:**

    - `folder`: with `config.json` and `model.safetensors`, or its shards and their index.
    - `dtype`: of the weights; None is that of the checkpoint's embedding. Decay rates and gated norms are float32
      whatever it is, and whatever they are in the checkpoint.
    - `mtp`: load the head for one token further: None if there is one, True always, False never.
    - `sharding`: where arrays go: one for all, or a function of path (".layers.layers.blocks[0].mlp.up_proj.weight")
      and shape; each device's part is read by itself. None is the default device.
    - `options`: `implementation`, `unroll` and so on of `qwen3_5`.

    **Returns:** `(model, config)`.

    **Raises:** `ValueError` that names the file, field or tensor, for anything that is missing, too much, of the wrong
    shape, dtype or `model_type`, or cut short.
    """
    folder = Path(folder)
    checkpoint = Checkpoint(folder)
    raw = read_json(folder)
    names = Names.of(checkpoint.tensors, folder)
    with_mtp = any(map(names.is_mtp, checkpoint.tensors))
    require(
        with_mtp or not mtp,
        f"load: `{folder}` has no `mtp.*` tensors, but `mtp` is True: leave it at None, which loads them if there are",
    )
    config = config_from_hf(raw, mtp_head=with_mtp and mtp is not False)
    _check_sizes(checkpoint, config)
    stored = DTYPES.get(checkpoint.tensors[names("embed_tokens.weight")].dtype, np.dtype("f4"))
    skeleton = make_skeleton(config, stored if dtype is None else dtype, **options)
    found = places(config, skeleton, Layout.of_names(checkpoint.tensors))
    check(checkpoint, names, config, found)

    filled = {}
    for place in found:
        where = sharding(place.path, place.array) if callable(sharding) else sharding
        filled[place.path] = _array(checkpoint, names, place, where)
    model = jax.tree_util.tree_map_with_path(lambda path, _: filled[jax.tree_util.keystr(path)], skeleton)
    return model, config


def _check_sizes(checkpoint: Checkpoint, config: Qwen3_5Config) -> None:
    """No size is larger than all that the checkpoint holds, or the model's shapes would take for ever to be made."""
    shapes = [size for tensor in checkpoint.tensors.values() for size in tensor.shape]
    largest = max([len(checkpoint.tensors), *shapes])
    for entry in dataclasses.fields(config):
        value = getattr(config, entry.name)
        require(
            not isinstance(value, int) or value <= largest,
            f"load: `{entry.name}` must be at most {largest}, the largest size in `{checkpoint.folder}`, but by "
            f"config.json it is {value}: correct config.json",
        )


def make_skeleton(config: Qwen3_5Config, dtype: DTypeLike, **options: Any) -> HybridLM:
    """The model of a config, of `jax.ShapeDtypeStruct`s."""
    dtype = floating_dtype("load", dtype)
    key = jax.eval_shape(lambda: jax.random.key(0))
    return eqx.filter_eval_shape(lambda key: qwen3_5(config, dtype=dtype, key=key, **options), key)


def floating_dtype(op: str, dtype: DTypeLike) -> np.dtype:
    """`dtype` as a numpy dtype that a checkpoint can hold.

    **Raises:** `ValueError` for anything else, a name that is no dtype's included.
    """
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    kinds = sorted(kind.name for kind in DTYPES.values())
    require(
        found is not None and found.name in kinds,
        f"{op}: `dtype` must be one of {', '.join(kinds)}, but it is {dtype if found is None else found.name}",
    )
    return cast(np.dtype, found)


def check(checkpoint: Checkpoint, names: Names, config: Qwen3_5Config, found: Sequence[Place]) -> None:
    """Every element of every array has a tensor, each tensor is whole, of its shape and used, or of a kind that is
    passed over."""
    expected: dict[str, tuple[int, ...]] = {}
    for place in found:
        inner = place.array.shape[place.stacked :]
        for parts in place.periods:
            expected |= {names(part.tensor): part.shape for part in parts}
            sizes = sum(_size(part, inner) for part in parts)
            require(sizes == math.prod(inner), f"load: `{place.path}` would be left at random values in part")
    missing = sorted(expected.keys() - checkpoint.tensors.keys())
    ignored = {
        name for name in checkpoint.tensors if names.is_vision(name) or (names.is_mtp(name) and not config.mtp_head)
    }
    head = names("lm_head.weight")
    tied = {head} if config.tied_head else set()
    extra = sorted(checkpoint.tensors.keys() - expected.keys() - ignored - tied)
    require(
        not missing,
        f"load: `{checkpoint.folder}` lacks the tensor {first(missing)}"
        + (f", and has {first(extra)} that this model has no place for" if extra else "")
        + "; fetch it again, or correct config.json",
    )
    require(
        not extra,
        f"load: `{checkpoint.folder}` has the tensor {first(extra)} that this model has no place for: is config.json "
        "of another model?",
    )
    for name, shape in expected.items():
        tensor = checkpoint.tensors[name]
        require(
            tensor.shape == shape,
            f"load: the tensor `{name}` must be {list(shape)} by config.json, but it is {list(tensor.shape)}",
        )
        require(
            tensor.dtype in DTYPES,
            f"load: the tensor `{name}` must hold {', '.join(DTYPES)}, but it holds {tensor.dtype}: quantised weights "
            "are not read",
        )
    if config.tied_head and head in checkpoint.tensors:
        same = _equal(checkpoint, head, names("embed_tokens.weight"))
        require(
            same,
            f"load: `{head}` is not the embedding, though config.json ties them: set `tie_word_embeddings` to false to "
            "load it, or remove the tensor",
        )


def _size(part: Part, inner: tuple[int, ...]) -> int:
    if part.of_array is None:
        return math.prod(inner)
    return part.of_array(np.broadcast_to(np.zeros((), np.int8), inner)).size


def _equal(checkpoint: Checkpoint, *names: str, rows: int = 4096) -> bool:
    a, b = map(checkpoint.view, names)
    same = a.shape == b.shape and all(np.array_equal(a[i : i + rows], b[i : i + rows]) for i in range(0, len(a), rows))
    for name in names:
        checkpoint.release(name)
    return same


def _array(checkpoint: Checkpoint, names: Names, place: Place, where: Sharding | None) -> jax.Array:
    shape = place.array.shape

    def read(index: tuple[slice, ...]) -> np.ndarray:
        bounds = [part.indices(size)[:2] for part, size in zip(index, shape)]
        out = _empty([end - begin for begin, end in bounds], place.array.dtype)
        if not place.stacked:
            _fill(checkpoint, names, place.periods[0], out, bounds, shape)
        else:
            for slot, period in enumerate(range(*bounds[0])):
                _fill(checkpoint, names, place.periods[period], out[slot], bounds[1:], shape[1:])
        return out

    if where is None:
        return jax.device_put(read((slice(None),) * len(shape)), may_alias=True)
    return jax.make_array_from_callback(shape, where, read)  # pyright: ignore[reportArgumentType]


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    memory = np.empty(size + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _fill(checkpoint, names, parts, out, bounds, shape) -> None:
    """Copy (and cast) what lies within `bounds` of a layer's array of `shape` into `out`."""
    index = tuple(slice(*bound) for bound in bounds)
    whole = out.shape == tuple(shape)
    alone = parts[0].of_array is None  # one tensor is all of it: no more than the bounds has to be read
    target = out if whole or alone else np.empty(shape, out.dtype)
    for part in parts:
        source = checkpoint.view(names(part.tensor))
        if part.of_tensor is not None:
            source = part.of_tensor(source)
        if alone:
            target[...] = source[index]
        else:
            part.of_array(target)[...] = source
        checkpoint.release(names(part.tensor))
    if target is not out:
        out[...] = target[index]
