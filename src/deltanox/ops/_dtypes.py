"""The dtype that sums, norms and softmaxes are evaluated in."""

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike


def inverse_root(square: Array, eps: float) -> Array:
    """1 / √(square + eps). With eps = 0 a zero vector stays zero instead of becoming 0 · ∞ = NaN: so are padding and
    masked tokens, wherever in a tile they lie."""
    if eps == 0:
        return jax.lax.rsqrt(jnp.where(square == 0, jnp.ones_like(square), square))
    return jax.lax.rsqrt(square + jnp.asarray(eps, square.dtype))


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """float64 for float64, float32 for everything narrower (`jnp.promote_types` refuses bfloat16 under strict
    promotion)."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
