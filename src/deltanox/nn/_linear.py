"""Linear layers without bias, drawn as Qwen draws them and applied to whole sequences."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from ..ops._dtypes import accumulator
from ..ops._manual import alike
from ..ops._product import dot
from ..ops._validate import describe, require, require_kind, require_size
from ._lora import LoRALinear

INIT_SCALE = 0.02
"""Standard deviation of every linear, convolution and embedding weight (`initializer_range` of the released
configs)."""


def normal(shape: tuple[int, ...], *, dtype: DTypeLike = jnp.float32, key: PRNGKeyArray) -> Array:
    """N(0, 0.02) values, drawn in float32 and rounded to `dtype` afterwards."""
    return (INIT_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def linear(in_size: int, out_size: int, *, dtype: DTypeLike = jnp.float32, key: PRNGKeyArray) -> eqx.nn.Linear:
    """An `eqx.nn.Linear` without bias, `weight` [out_size in_size] ~ N(0, 0.02)."""
    in_size, out_size = require_size("linear", "in_size", in_size), require_size("linear", "out_size", out_size)
    # Equinox draws a uniform weight of its own: made abstractly, so that nothing is drawn twice
    skeleton = eqx.filter_eval_shape(eqx.nn.Linear, in_size, out_size, use_bias=False, dtype=dtype, key=key)
    return eqx.tree_at(lambda layer: layer.weight, skeleton, normal((out_size, in_size), dtype=dtype, key=key))


def apply_linear(layer: eqx.nn.Linear | LoRALinear, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
    """y = x Wᵀ over the last axis, in x's dtype. Of a `LoRALinear`, x Wᵀ + (alpha / rank) (x downᵀ) upᵀ.

    One product for the whole sequence, with the tokens in rows: no transpose of the weight or of the tokens is made.
    It has the precision of `jax_default_matmul_precision`.

    **Arguments:** `layer`: a linear layer without bias; `x`: its inputs along the last axis.

    **Returns:** the outputs along the last axis, in x's dtype (the weight is rounded to it). A low-rank change is never
    added to the weight, whose last bits it may not reach: the two products are added in float32, and rounded once.

    **Raises:** `ValueError` if the last axis isn't the layer's input size.
    """
    weight = layer.base if isinstance(layer, LoRALinear) else layer.weight
    require_kind("linear", "x", x, "*B I")
    require(
        x.ndim >= 1 and x.shape[-1] == weight.shape[1],
        f"linear: the last axis of `x` must be the layer's input size {weight.shape[1]}, but x is {describe(x)}: "
        f"build the layer with in_size={x.shape[-1] if x.ndim else '...'} or give it features of its own size",
    )
    if not isinstance(layer, LoRALinear):
        return dot(*alike((x, weight.astype(x.dtype))))
    up = jnp.asarray(layer.scale, layer.up.dtype) * layer.up
    base = jax.lax.stop_gradient(weight)
    x, base, up, down = alike((x, base.astype(x.dtype), up.astype(x.dtype), layer.down.astype(x.dtype)))
    wide = accumulator(x.dtype)
    y = jax.lax.dot_general(x, base, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=wide)
    return (y + dot(dot(x, down), up).astype(wide)).astype(x.dtype)
