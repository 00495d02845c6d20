"""Which dtype each part of a model is stored, computed and accumulated in.

A model's arrays are of two kinds. Most are weights of matrix products, which tolerate bfloat16. A few are kept in
float32 by their layer, because a rounding there is not noise but another model: the decay rates (`A_log`, `dt_bias`:
bfloat16 changes a head's memory by up to 0.8 %) and the weight of the gated norm. A layer says which of its fields
those are:

    class GatedDeltaNet(eqx.Module):
        keep_float32: ClassVar[tuple[str, ...]] = ("A_log", "dt_bias")

and every cast here respects it, in whichever container the layer lies.
"""

import dataclasses
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

Tree = TypeVar("Tree")

_NAMES = ("bfloat16", "float16", "float32", "float64")
_FIELDS = ("parameter", "compute", "accumulation", "state", "decay")


@dataclasses.dataclass(frozen=True)
class Precision:
    """The dtypes of a model, of its activations and of its recurrent state.

    - `parameter`: dtype in which weights are stored and updated by the optimiser.
    - `compute`: dtype of weights and activations in the forward and backward pass. Norms, softmax, rotary tables,
      gates and the recurrence are float32 inside whatever it is.
    - `accumulation`: dtype in which the gradients of a step's batches are summed (`train.accumulation`): float32 or
      float64. Matrix products sum in float32 whatever it is.
    - `state`: dtype in which the recurrence keeps its states, float32 by default: over 2,048 tokens a bfloat16 state
      drifts by 1e-2, a float32 one by 3e-7.
    - `decay`: dtype of the arrays that layers list in `keep_float32`, and of the delta rule's gates: float32 or
      float64.
    - `strict_hf_rounding`: whether layers round where Hugging Face's models do in bfloat16 (see `GatedDeltaNet`).

    Each dtype is given as a string ("bfloat16", "float16", "float32", "float64") or a dtype, and kept as a numpy
    dtype, so that two records of the same dtypes are equal and hash equally.

    **Raises**: `ValueError` for anything that is not one of these dtypes, and for a `decay` or an `accumulation` below
    float32. Casting a model raises it for float64 where JAX has 64-bit types switched off: it would go on in float32.
    """

    parameter: Any = "float32"
    compute: Any = "float32"
    accumulation: Any = "float32"
    state: Any = "float32"
    decay: Any = "float32"
    strict_hf_rounding: Any = False

    def __post_init__(self):
        for name in _FIELDS:
            object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        if not isinstance(self.strict_hf_rounding, bool):
            raise ValueError(
                f"Precision: `strict_hf_rounding` must be True or False, but it is {self.strict_hf_rounding!r}"
            )
        if self.accumulation.itemsize < 4:
            raise ValueError(
                f"Precision: `accumulation` must be float32 or float64, but it is {self.accumulation.name}: a sum of "
                "many gradients loses the small ones in 16 bits, so leave it at float32"
            )
        if self.decay.itemsize < 4:
            raise ValueError(
                f"Precision: `decay` must be float32 or float64, but it is {self.decay.name}: the decay rates of a "
                f"head "
                "cannot be told apart in 16 bits, so leave it at float32"
            )

    def cast_parameters(self, model: Tree) -> Tree:
        """`model` as it is stored: floating arrays in `parameter`, those of `keep_float32` in `decay`."""
        return self._cast(model, self.parameter)

    def cast_compute(self, model: Tree) -> Tree:
        """`model` as it is computed with: floating arrays in `compute`, those of `keep_float32` in `decay`.

        Differentiable: taken inside the loss, gradients arrive in the dtype of the stored parameters.
        """
        return self._cast(model, self.compute)

    def require_available(self) -> None:
        """**Raises**: `ValueError` for float64 where JAX has 64-bit types switched off."""
        wide = [name for name in _FIELDS if getattr(self, name) == np.float64]
        if wide and jax.dtypes.canonicalize_dtype(np.float64) != np.float64:
            raise ValueError(
                f"Precision: `{wide[0]}` is float64, which needs JAX's 64-bit types, but they are switched off: set "
                "the environment variable JAX_ENABLE_X64=1, or give float32"
            )

    def _cast(self, model, dtype):
        self.require_available()

        def cast(x, to):
            return x.astype(to) if _is_floating(x) else x

        def visit(node):
            """Cast what lies below `node`; a node there that lists fields of its own is visited in turn."""
            kept = getattr(type(node), "keep_float32", ())

            def leaf(path, x):
                if x is not node and _keeps(x):
                    return visit(x)
                return cast(x, self.decay if path and _name(path[0]) in kept else dtype)

            return jax.tree_util.tree_map_with_path(leaf, node, is_leaf=lambda x: x is not node and _keeps(x))

        return visit(model)


def _keeps(node) -> bool:
    return bool(getattr(type(node), "keep_float32", ()))


def _is_floating(x) -> bool:
    return hasattr(x, "dtype") and hasattr(x, "shape") and jnp.issubdtype(x.dtype, jnp.floating)


def _name(entry) -> Any:
    """The field's name in an entry of a tree path, whatever the kind of its container."""
    return getattr(entry, "name", getattr(entry, "key", None))


def _dtype(name: str, value: Any) -> np.dtype:
    try:
        if value is None:  # numpy reads None as float64
            raise TypeError
        dtype = jnp.dtype(value)
    except TypeError:
        dtype = None
    if dtype is None or dtype.name not in _NAMES:
        raise ValueError(
            f"Precision: `{name}` must be one of {', '.join(map(repr, _NAMES))} (a string or a dtype), but it is "
            f"{value!r}"
        )
    return dtype
