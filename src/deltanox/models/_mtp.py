"""The head that predicts one token further than the model."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, PyTree

from ..nn import KVCache, RMSNorm, apply_linear, linear
from ..ops._validate import describe, require, require_kind
from ._block import HybridBlock


class MTPHead(eqx.Module):
    """Multi-token prediction: from the model's output at token t and the embedding of token t + 1, features for token
    t + 2:

        x_t = fc [norm_e(embedding of token t + 1) | norm_h(hidden_t)];   y = norm(block(x))

    `hidden` is what the model's own head gets, the output of the final norm. Embedding and output head are the model's
    (`HybridLM.mtp_logits` puts them around this). The block is one of attention, with a cache of its own.

    Source: the `mtp.*` tensors of Qwen3-Next and Qwen3.5, whose names the fields have (`block` is `layers.0`);
    transformers passes over them. The order (embedding first, hidden after the final norm) is that of vLLM.
    """

    fc: eqx.nn.Linear
    pre_fc_norm_embedding: RMSNorm
    pre_fc_norm_hidden: RMSNorm
    block: HybridBlock
    norm: RMSNorm

    def __init__(self, block: HybridBlock, *, embed_size: int, eps: float = 1e-6, dtype: DTypeLike, key: PRNGKeyArray):
        """**Arguments:** `block`: a block of attention; `embed_size`: D; `eps`: of the norms; `dtype`: of the weights;
        `key`: for the N(0, 0.02) weight of `fc`."""
        self.fc = linear(2 * embed_size, embed_size, dtype=dtype, key=key)
        self.pre_fc_norm_embedding = RMSNorm(embed_size, eps=eps, dtype=dtype)
        self.pre_fc_norm_hidden = RMSNorm(embed_size, eps=eps, dtype=dtype)
        self.block = block
        self.norm = RMSNorm(embed_size, eps=eps, dtype=dtype)

    def init_state(self, capacity: int) -> KVCache:
        """The empty cache of the head's attention."""
        return self.block.init_state(capacity)

    def __call__(
        self,
        embedded: Float[Array, "T D"],
        hidden: Float[Array, "T D"],
        state: KVCache | None = None,
        *,
        segment_ids: Int[Array, "T"] | None = None,
        mask: Bool[Array, "T"] | None = None,
        positions: Int[Array, "T"] | Int[Array, "3 T"] | None = None,
    ) -> tuple[Float[Array, "T D"], PyTree]:
        """**Arguments:** `embedded`: of token t + 1 in row t; `hidden`: of token t; the others as in `HybridLM`, those
        of token t.

        **Returns:** `(y, state)`: y [T D], what the model's head turns into logits for token t + 2.

        **Raises:** `ValueError` for shapes that don't fit.
        """
        require_kind("MTPHead", "embedded", embedded, "T D")
        require_kind("MTPHead", "hidden", hidden, "T D")
        require(
            embedded.shape == hidden.shape,
            f"MTPHead: `embedded` and `hidden` must both be [T, D], but they are {describe(embedded)} and "
            f"{describe(hidden)}",
        )
        pair = [self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)]
        x = apply_linear(self.fc, jnp.concatenate(pair, axis=-1))
        if mask is not None:
            x = jnp.where(mask[:, None], x, jnp.zeros((), x.dtype))
        x, state, _ = self.block(x, state, segment_ids=segment_ids, mask=mask, positions=positions)
        return self.norm(x), state
