"""Where packed documents begin, in the terms that convolution and recurrence share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def previous_real(mask: Bool[Array, "*B T"]) -> Int[Array, "*B T"]:
    """Index of the last unmasked token before each token, -1 where there is none."""
    index = jnp.arange(mask.shape[-1], dtype=jnp.int32)
    latest = jax.lax.cummax(jnp.where(mask, index, -1), axis=mask.ndim - 1)
    return jnp.concatenate([jnp.full_like(latest[..., :1], -1), latest[..., :-1]], axis=-1)


def boundaries(
    segment_ids: Int[Array, "*B T"] | None, mask: Bool[Array, "*B T"] | None = None
) -> Bool[Array, "*B T"] | None:
    """True at each token that begins a new segment, None where nothing was packed.

    A boundary is any change of the id between neighbours. Masked tokens are skipped: their ids do not count, and a real
    token is compared with the last real one before it. The first real token is never a boundary, since the
    initial state belongs to the first segment.
    """
    if segment_ids is None:
        return None
    if mask is None:
        changed = segment_ids[..., 1:] != segment_ids[..., :-1]
        return jnp.concatenate([jnp.zeros_like(changed, shape=(*changed.shape[:-1], 1)), changed], axis=-1)
    before = previous_real(mask)
    previous = jnp.take_along_axis(segment_ids, jnp.maximum(before, 0), axis=-1)
    return mask & (before >= 0) & (segment_ids != previous)
