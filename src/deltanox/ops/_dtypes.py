"""The dtype that sums, norms and softmaxes are evaluated in."""

import jax.numpy as jnp
from jax.typing import DTypeLike


def accumulator(dtype: DTypeLike) -> jnp.dtype:
    """float64 for float64, float32 for everything narrower (`jnp.promote_types` refuses bfloat16 under strict
    promotion)."""
    return jnp.dtype(jnp.float64 if jnp.dtype(dtype) == jnp.float64 else jnp.float32)
