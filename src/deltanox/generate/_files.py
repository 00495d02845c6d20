"""What a model has read, in a file."""

import contextlib
import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import equinox as eqx
import jax
import numpy as np

from .._oserror import safetensors_errors
from .._read import parse_json
from ..models import HybridLM, HybridState
from ..ops._validate import require

_KIND, _WEIGHTS = "deltanox.state.1", "weights"


def save_state(file: str | Path, state: HybridState, model: HybridLM) -> None:
    """Write a state of `prefill` or `decode`, so that a prompt is read once and gone on from in other processes.

    **Arguments:** `file`: safetensors, replaced if it is there; `state`: with the batch in front; `model`: that made
    it. The file holds every array of the state under its path, and samples of the model's weights.

    **Raises:** `ValueError` for a state that isn't the model's.
    """
    from safetensors.flax import save_file as write

    save_file = safetensors_errors(file)(write)
    arrays = _named(state)
    _check_arrays("save_state", "the state", {name: _kind(x) for name, x in arrays.items()}, model)
    part = Path(f"{file}.part")
    with permissions_of_a_new_file(part):
        save_file(arrays, part, metadata={"format": _KIND, _WEIGHTS: json.dumps(_samples(model))})
    os.replace(part, file)


def load_state(file: str | Path, model: HybridLM) -> HybridState:
    """Read what `save_state` wrote: the same arrays, bit for bit. `stream(..., state=)` and `prefill(..., state=)` go
    on from it; `state.resize` makes room.

    **Raises:** `ValueError` for a file that is damaged or of another kind, and one of a model with other sizes, dtypes
    or weights, by the name of the first array that differs.
    """
    from safetensors import SafetensorError, safe_open

    require(Path(file).is_file(), f"load_state: there is no file `{file}`; write it with save_state")
    try:
        with safe_open(file, framework="flax") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no mapping)
    except SafetensorError as error:
        raise ValueError(f"load_state: `{file}` is damaged: {error}; write it again with save_state") from None
    require(
        metadata.get("format") == _KIND, f"load_state: `{file}` is no state that save_state wrote; give one that is"
    )
    skeleton = _check_arrays("load_state", f"`{file}`", {name: _kind(x) for name, x in arrays.items()}, model)
    where = f"load_state: the samples of the weights in `{file}`"
    theirs = parse_json(metadata.get(_WEIGHTS, ""), where, "write it again with save_state")
    ours = _samples(model)
    other = next((name for name in ours if ours[name] != theirs.get(name)), None)
    require(
        other is None,
        f"load_state: `{file}` was made with other weights: `{other}` of the model differs; prefill again with "
        "this one",
    )
    return jax.tree.unflatten(jax.tree.structure(skeleton), [arrays[name] for name in _named(skeleton)])


@contextlib.contextmanager
def permissions_of_a_new_file(path: Path) -> Iterator[None]:
    """The file that is written here gets the permissions that umask and folder give to any new file: safetensors makes
    files that only their owner can read."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    yield
    path.chmod(mode)


def _named(tree) -> dict:
    """The leaves by their paths, such as `.blocks[0].recurrent`."""
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}


def _kind(x) -> str:
    return f"{np.dtype(x.dtype).name}{list(x.shape)}"


def _check_arrays(op: str, source: str, found: dict[str, str], model: HybridLM) -> HybridState:
    """The arrays of `found` must be those of the model's state, of any batch and capacity. Returns its shapes."""
    sizes = {name: json.loads(kind[kind.index("[") :]) for name, kind in found.items()}
    batch = next((size[0] for size in sizes.values() if size), 0)
    capacity = next((size[-3] for name, size in sizes.items() if name.endswith(".key") and len(size) > 3), 1)
    skeleton = eqx.filter_eval_shape(model.init_state, max(capacity, 1))
    skeleton = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape), x.dtype), skeleton)
    wanted = {name: _kind(x) for name, x in _named(skeleton).items()}
    for name in [*wanted, *found]:
        have, want = found.get(name, "missing"), wanted.get(name, "not there")
        require(
            have == want,
            f"{op}: `{name}` is {have} in {source}, but {want} in a state of this model; use the model that made it, "
            "of the same sizes and dtype, stacked or not as then",
        )
    return skeleton


def _samples(model: HybridLM) -> dict[str, int]:
    """Checksums of up to 64 values at the beginning and at the end of every weight."""
    corners = jax.device_get(
        {name: [x[(i,) * (x.ndim - 1)] for i in (0, -1)] for name, x in _named(eqx.filter(model, eqx.is_array)).items()}
    )
    return {
        name: zlib.crc32(b"".join([first[:64].tobytes(), last[-64:].tobytes()]))
        for name, (first, last) in corners.items()
    }
