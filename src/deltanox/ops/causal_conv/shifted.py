"""The convolution as a sum of W shifted copies of its input: one fused pass of multiply-adds, no patches in memory.

A depthwise convolution of width 4 moves one float in and one out for four multiply-adds: it is bound by memory on
every platform. XLA's own convolution is an order of magnitude slower on a CPU (696 ms against 53 ms for f32
[1, 2048, 6144] and W = 4, two cores).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

FAR = 2**30  # tokens since a boundary that never was


def since_boundary(boundary: Bool[Array, "B T"] | None) -> Int[Array, "B T"] | None:
    """Tokens between each token and the last boundary at or before it; FAR or more in the first segment."""
    if boundary is None:
        return None
    index = jnp.arange(boundary.shape[1], dtype=jnp.int32)[None]
    return index - jax.lax.cummax(jnp.where(boundary, index, -FAR), axis=1)


def place(
    x: Float[Array, "B T C"], past: Float[Array, "B P C"] | None, mask: Bool[Array, "B T"] | None
) -> tuple[Float[Array, "B T C"], Float[Array, "B P C"] | None]:
    """Zeros at masked tokens, and the P past inputs moved right before the first real one, over leading masked ones."""
    if mask is None:
        return x, past
    x = jnp.where(mask[..., None], x, 0)
    if past is None or past.shape[1] == 0:
        return x, past
    first = jnp.where(jnp.any(mask, axis=1), jnp.argmax(mask, axis=1), mask.shape[1]).astype(jnp.int32)

    def row(row, past, first):
        return jax.lax.dynamic_update_slice(row, past, (first, jnp.zeros_like(first)))

    both = jax.vmap(row)(jnp.concatenate([jnp.zeros_like(past), x], axis=1), past, first)
    return both[:, past.shape[1] :], both[:, : past.shape[1]]


def tap(
    x: Float[Array, "B T C"], past: Float[Array, "B P C"] | None, since: Int[Array, "B T"] | None, back: int
) -> Float[Array, "B T C"]:
    """The input `back` tokens before each token; zero where that lies before the token's segment, or in no past."""
    if back == 0:
        return x
    length = x.shape[1]
    kept = x[:, : max(length - back, 0)]
    if past is None:
        moved = jnp.pad(kept, ((0, 0), (min(back, length), 0), (0, 0)))
    else:
        start = past.shape[1] - back
        moved = jnp.concatenate([past[:, start : start + length], kept], axis=1)
    return moved if since is None else jnp.where((since >= back)[..., None], moved, 0)


def row(weight: Float[Array, "C W"], back: int) -> Float[Array, "1 1 C"]:
    """The weight of the input `back` tokens before: tap W − 1 multiplies the current token."""
    return weight[:, weight.shape[1] - 1 - back][None, None]


def preactivation(x, weight, bias, past, since) -> Float[Array, "B T C"]:
    """Σ_w weight[:, w] x_{t−W+1+w} + bias, in the weight's dtype, oldest tap first."""
    width = weight.shape[1]
    backs = reversed(range(width))
    total: Any = sum(tap(x, past, since, back).astype(weight.dtype) * row(weight, back) for back in backs)
    return total if bias is None else total + bias[None, None]


def activate(pre: Float[Array, "*S"], activation: str | None) -> Float[Array, "*S"]:
    """SiLU, or nothing."""
    return pre * jax.nn.sigmoid(pre) if activation == "silu" else pre


def shifted(x, weight, bias, past, boundary, mask, activation):
    """The outputs, in x's dtype. Weight and bias come in the dtype that is accumulated in."""
    x, past = place(x, past, mask)
    y = activate(preactivation(x, weight, bias, past, since_boundary(boundary)), activation).astype(x.dtype)
    return y if mask is None else jnp.where(mask[..., None], y, 0)


def chunked(x, weight, bias, past, boundary, mask, activation):
    """`shifted`, differentiated by JAX any number of times; only the inputs are kept for it."""

    @jax.checkpoint
    def op(x, weight, bias, past):
        return shifted(x, weight, bias, past, boundary, mask, activation)

    return op(x, weight, bias, past)


def final_state(
    x: Float[Array, "B T C"],
    past: Float[Array, "B P C"] | None,
    boundary: Bool[Array, "B T"] | None,
    mask: Bool[Array, "B T"] | None,
    size: int,
) -> Float[Array, "B P C"]:
    """The last `size` real inputs of the last segment, oldest first; zeros where the segment is shorter."""
    batch, length, channels = x.shape
    back = jnp.arange(size, 0, -1, dtype=jnp.int32)[None]  # [1 P]: how many inputs from the end
    if size == 0:
        return jnp.zeros((batch, 0, channels), x.dtype)
    if mask is None:
        kept = x[:, max(length - size, 0) :]
        older = jnp.zeros((batch, size, channels), x.dtype) if past is None else past
        state = jnp.concatenate([older[:, min(length, size) :], kept], axis=1)
        if boundary is None:
            return state
        since: Any = since_boundary(boundary)
        return jnp.where((since[:, -1:] >= back - 1)[..., None], state, 0)
    rank = jnp.cumsum(mask, axis=1, dtype=jnp.int32)
    order = rank[:, -1:] - back  # [B P]: which real token, counted from 0; negative reaches into the past
    # each place's token: the first whose rank is order + 1
    index = jnp.argmax(rank[:, None] == (order + 1)[..., None], axis=-1)
    state = jnp.take_along_axis(x, index[..., None], axis=1)
    new = (order >= 0)[..., None]
    if past is None:
        state = jnp.where(new, state, 0)
    else:
        older = jnp.take_along_axis(past, jnp.clip(size + order, 0, size - 1)[..., None], axis=1)
        state = jnp.where(new, state, older)
    if boundary is None:
        return state
    segment = jnp.cumsum(boundary, axis=1, dtype=jnp.int32)
    own = jnp.where(new[..., 0], jnp.take_along_axis(segment, index, axis=1), 0)
    return jnp.where((own == segment[:, -1:])[..., None], state, 0)
