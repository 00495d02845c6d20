r"""The causal convolution, token by token: the definition that the other implementations are held against.

Two windows of W − 1 inputs travel along: what the taps see, and what will be the state. At a token x_t:

    where a segment begins     both windows are zeros
    a real token               x_t enters both windows, and y_t = act(Σ_w weight[:, w] [window, x_t][w] + bias)
    a masked token             y_t = 0; a zero enters the taps' window once a real token has been seen, the state stays
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._float64 import in_float64


def recurrence(
    x: Float[Array, "B T C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, " C"] | None,
    initial_state: Float[Array, "B W-1 C"],
    boundary: Bool[Array, "B T"] | None,
    mask: Bool[Array, "B T"] | None,
    activation: str | None,
) -> tuple[Float[Array, "B T C"], Float[Array, "B W-1 C"]]:
    """The token loop, in the dtype of its arrays."""
    batch, length, channels = x.shape
    boundary = jnp.zeros((batch, length), bool) if boundary is None else boundary
    mask = jnp.ones((batch, length), bool) if mask is None else mask
    taps = weight.T[None]
    bias = jnp.zeros((channels,), x.dtype) if bias is None else bias

    def token(carry, inputs):
        window, state, seen = carry
        x, begins, real = inputs
        window, state = (jnp.where(begins[:, None, None], 0, a) for a in (window, state))
        here = real[:, None]
        x = jnp.where(here, x, 0)[:, None]
        window = jnp.concatenate([window, x], axis=1)
        y = jnp.sum(taps * window, axis=1) + bias[None]
        if activation == "silu":
            y = y * jax.nn.sigmoid(y)
        seen = seen | real
        window = jnp.where(seen[:, None, None], window[:, 1:], window[:, :-1])
        state = jnp.where(here[..., None], jnp.concatenate([state, x], axis=1)[:, 1:], state)
        return (window, state, seen), jnp.where(here, y, 0)

    start = (initial_state, initial_state, jnp.zeros((batch,), bool))
    tokens = tuple(jnp.moveaxis(a, 1, 0) for a in (x, boundary, mask))
    (_, state, _), y = jax.lax.scan(token, start, tokens)
    return jnp.moveaxis(y, 0, 1), state


def reference(x, weight, bias, initial_state, boundary, mask, activation):
    """`recurrence` in float64, whatever the dtype of its arrays and JAX's x64 switch (`in_float64`). Slow: for checks.

    Results are cast to x's dtype.
    """
    return _reference((x, weight, bias, initial_state), (boundary, mask), activation)


@in_float64
def _reference(floats, rest, activation):
    x, weight, bias, before = (None if a is None else a.astype(jnp.float64) for a in floats)
    y, state = recurrence(x, weight, bias, before, *rest, activation)
    return y.astype(floats[0].dtype), state.astype(floats[0].dtype)
