"""Rows of an embedding, whose gradient is summed in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ._dtypes import accumulator


def embedding_rows(weight: Float[Array, "N D"], tokens: Int[Array, "*B"]) -> Float[Array, "*B D"]:
    """weight[tokens], NaN for an id outside [0, N).

    JAX's own transpose of a gather adds the tokens' cotangents up in the weight's dtype: in bfloat16 a sum of ones
    stops at 256. Here they are added up in float32 (float64 for float64) and rounded once. Every derivative exists.
    """
    if weight.shape[0] > jnp.iinfo(tokens.dtype).max:  # uint8 cannot hold a number outside a vocabulary of 257
        tokens = tokens.astype(jnp.int32)
    # a negative id must not count from the end
    tokens = jnp.where(tokens < 0, jnp.asarray(weight.shape[0], tokens.dtype), tokens)
    return _rows(weight, tokens)


@jax.custom_jvp
def _rows(weight, tokens):
    return weight.at[tokens].get(mode="fill", fill_value=jnp.nan)


@_rows.defjvp
def _rows_jvp(primals, tangents):
    weight, tokens = primals
    # linear in the tangent, which is never evaluated in reverse mode: only its transpose is, a sum in the wide dtype
    wide = tangents[0].astype(accumulator(weight.dtype))
    rows = wide.at[tokens].get(mode="fill", fill_value=0)
    return _rows(weight, tokens), rows.astype(weight.dtype)
