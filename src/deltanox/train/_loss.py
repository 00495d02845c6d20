"""The loss of a batch of packed rows."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from deltanox.train._data import BOUNDARY, Batch

from ..ops.cross_entropy import cross_entropy


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, so that they add over batches.

    - `nats`: negative log-likelihood of the labels, float32.
    - `tokens`, `bytes`: labels, and those of them that are bytes (all but the ends of documents).
    - `router`: the model's router statistics summed over layers and rows, None for a model without sparse layers.
    """

    nats: Float[Array, ""]
    tokens: Int[Array, ""]
    bytes: Int[Array, ""]
    router: Any = None


def next_token_loss(
    model: Any, batch: Batch, *, block_size: int = 8192, remat: Callable[..., Any] | None = None
) -> LossSums:
    """Negative log-likelihood of the labels of `batch`, each row a call of the unbatched `model.hidden`.

    **Arguments**: `model`, with `hidden(tokens, state, *, segment_ids, mask, positions) -> (hidden, state, stats)` and
    `head_weight` [N D]; `batch`; `block_size`, entries of the vocabulary whose logits are in memory together; `remat`,
    a policy of `deltanox.remat` for the model's layers (`hidden` takes it by that name) and for the logits.

    **Raises**: `ValueError` for a policy that the model doesn't take or cannot follow.
    """
    extra = {}
    if remat is not None:
        if "remat" not in inspect.signature(model.hidden).parameters:
            raise ValueError(
                f"remat: `{type(model).__name__}.hidden` takes no argument `remat`, so that a policy would be ignored: "
                "leave out the section [remat], or give the method one"
            )
        extra["remat"] = remat

    def row(tokens, segment_ids, mask):
        hidden, _, stats = model.hidden(tokens, None, segment_ids=segment_ids, mask=mask, positions=None, **extra)
        return hidden, stats

    hidden, stats = jax.vmap(row)(batch.tokens, batch.segment_ids, batch.mask)
    labels = jnp.asarray(batch.labels)
    mask = None if batch.mask is None else jnp.asarray(batch.mask)
    matrix = model.head_weight.astype(hidden.dtype)
    nats = cross_entropy(hidden, matrix, labels, mask=mask, block_size=block_size, remat=remat).sum()
    real = jnp.ones(labels.shape, bool) if mask is None else mask
    return LossSums(
        nats=nats.astype(jnp.float32),
        tokens=real.sum(dtype=jnp.int32),
        bytes=(real & (labels != BOUNDARY)).sum(dtype=jnp.int32),
        router=jax.tree.map(lambda x: x.sum(axis=0), stats),
    )
