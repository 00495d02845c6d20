"""The dense feed-forward part of a block."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from ..ops._compiled import compiled
from ..ops._validate import describe, require, require_kind, require_size
from ._linear import apply_linear, linear


class SwiGLU(eqx.Module):
    """y = W_down (silu(W_gate x) · W_up x), without biases.

    Source: arXiv:2002.05202, as in Qwen3-Next and Qwen3.5; the weights keep Hugging Face's names and shapes.
    """

    gate_proj: eqx.nn.Linear
    up_proj: eqx.nn.Linear
    down_proj: eqx.nn.Linear
    embed_size: int = eqx.field(static=True)

    def __init__(self, embed_size: int, hidden_size: int, *, dtype: DTypeLike = jnp.float32, key: PRNGKeyArray):
        """**Arguments:** `embed_size`: D; `hidden_size`: width inside; `dtype`: of the weights; `key`: for N(0, 0.02)
        weights."""
        require_size("SwiGLU", "embed_size", embed_size)
        require_size("SwiGLU", "hidden_size", hidden_size)
        gate_key, up_key, down_key = jax.random.split(key, 3)
        self.gate_proj = linear(embed_size, hidden_size, dtype=dtype, key=gate_key)
        self.up_proj = linear(embed_size, hidden_size, dtype=dtype, key=up_key)
        self.down_proj = linear(hidden_size, embed_size, dtype=dtype, key=down_key)
        self.embed_size = embed_size

    def __call__(self, x: Float[Array, "*B D"]) -> Float[Array, "*B D"]:
        """**Arguments:** `x`: any leading axes, features last (it acts on each token alone).  **Returns:** the same
        shape and dtype.

        **Raises:** `ValueError` if the last axis isn't `embed_size`.
        """
        require_kind("SwiGLU", "x", x, "*B D")
        require(
            x.ndim >= 1 and x.shape[-1] == self.embed_size,
            f"SwiGLU: the last axis of `x` must be embed_size = {self.embed_size}, but x is {describe(x)} [..., D]: "
            f"build the layer with embed_size={x.shape[-1] if x.ndim else '...'} or give it features of its own size",
        )
        gate = checkpoint_name(apply_linear(self.gate_proj, x), "mlp_gate")
        up = checkpoint_name(apply_linear(self.up_proj, x), "mlp_up")
        return apply_linear(self.down_proj, _gated(gate, up))


@compiled()
@jax.checkpoint  # the backward pass keeps both projections and their product, not what is between
def _gated(gate, up):
    return jax.nn.silu(gate) * up
