"""The loss of a batch of packed rows."""

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from deltanox.train._data import Batch
from deltanox.train._vocabulary import BOUNDARY

from ..ops.cross_entropy import cross_entropy


class LossSums(NamedTuple):
    """Sums over the real tokens of a batch, so that they add over batches.

    - `nats`: negative log-likelihood of the labels, float32.
    - `tokens`, `bytes`: labels, and, in text of bytes, those of them that are bytes (all but the ends of documents).
      Both are 0 where all is masked: a mean divides by their maximum with 1.
    - `router`: the model's router statistics summed over layers and rows, None for a model without sparse layers.
    - `further`: as `nats`, of the head for one token further, over the labels that `further_labels` says are real;
      None where it isn't asked for.
    """

    nats: Float[Array, ""]
    tokens: Int[Array, ""]
    bytes: Int[Array, ""]
    router: Any = None
    further: Float[Array, ""] | None = None


def further_labels(
    labels: Int[Array, "*B T"], segment_ids: Int[Array, "*B T"], mask: Bool[Array, "*B T"] | None
) -> tuple[Int[Array, "*B T"], Bool[Array, "*B T"]]:
    """The token after each label, and where there is one: at the last token of a document's part there is none."""

    def ahead(x):
        return jnp.concatenate([x[..., 1:], x[..., -1:]], axis=-1)

    real = ahead(segment_ids) == segment_ids
    real = real.at[..., -1].set(False)
    return ahead(labels), real if mask is None else real & mask & ahead(mask)


def next_token_loss(
    model: Any, batch: Batch, *, further: bool = False, block_size: int = 8192, remat: Callable[..., Any] | None = None
) -> LossSums:
    """Negative log-likelihood of the labels of `batch`, each row a call of the unbatched `model.hidden`.

    **Arguments**: `model`, with `hidden(tokens, state, *, segment_ids, mask, positions) -> (hidden, state, stats)` and
    `head_weight` [N D]; `batch`; `further`, whether the loss of the model's head for one token further (`model.mtp`,
    called with the labels as next tokens) is summed too; `block_size`, entries of the vocabulary whose
    logits are in memory together; `remat`,
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

    def row_further(hidden, labels, segment_ids, mask):
        embedded = model.embed(labels, mask)
        return model.mtp(embedded, hidden, segment_ids=segment_ids, mask=mask)[0]

    hidden, stats = jax.vmap(row)(batch.tokens, batch.segment_ids, batch.mask)
    labels = jnp.asarray(batch.labels)
    mask = None if batch.mask is None else jnp.asarray(batch.mask)
    matrix = model.head_weight.astype(hidden.dtype)
    nats = cross_entropy(hidden, matrix, labels, mask=mask, block_size=block_size, remat=remat).sum()
    sums = None
    if further:
        y = jax.vmap(row_further)(hidden, labels, jnp.asarray(batch.segment_ids), mask)
        targets, there = further_labels(labels, jnp.asarray(batch.segment_ids), mask)
        sums = (
            cross_entropy(y, matrix, targets, mask=there, block_size=block_size, remat=remat).sum().astype(jnp.float32)
        )
    real = jnp.ones(labels.shape, bool) if mask is None else mask
    return LossSums(
        nats=nats.astype(jnp.float32),
        tokens=real.sum(dtype=jnp.int32),
        bytes=(real & (labels != BOUNDARY)).sum(dtype=jnp.int32),
        router=jax.tree.map(lambda x: x.sum(axis=0), stats),
        further=sums,
    )
