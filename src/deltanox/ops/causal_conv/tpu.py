"""The convolution on the TPU kernels: what they are told of masks, segments and the past; what is left to jnp."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from .._derivatives import once_differentiable
from .._kernels import by_platform, folded
from .shifted import shifted, since_boundary
from .tpu_backward import conv_backward
from .tpu_common import HALO, LANES, Inputs, Options
from .tpu_forward import conv_forward

OP = "causal_conv1d"


def reason_against(x, weight) -> str | None:
    """Why the kernels cannot take their inputs; None if they can."""
    channels, width = weight.shape
    if channels % LANES:
        return f"C must be a multiple of {LANES}, the lanes of a TPU's registers, but it is {channels}"
    if width > HALO:
        return f"W must be at most {HALO}, the tokens that are kept between tiles, but it is {width}"
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return f"`x` must be bfloat16 or float32, but it is {x.dtype}"
    if x.size == 0:
        return "the batch must not be empty"
    return None


def first_real(mask: Bool[Array, "B T"]) -> Int[Array, " B"]:
    """The first real token of each row, T where there is none."""
    return jnp.where(jnp.any(mask, axis=1), jnp.argmax(mask, axis=1), mask.shape[1]).astype(jnp.int32)


def tap_bits(boundary, mask, first: Int[Array, " B"] | None, width: int) -> Int[Array, "B 1 T"] | None:
    """For each token, bit k where the input k tokens back is one that its tap reads: in the token's segment, and real
    or (`first` given) the past before the first real token. None where all bits would be set."""
    if mask is None:
        if boundary is None or width == 1:
            return None
        mask = jnp.ones(boundary.shape, bool)
    batch, length = mask.shape
    readable = jnp.concatenate([jnp.ones((batch, width - 1), bool), mask], axis=1)
    if first is not None:
        before = first[:, None] - jnp.arange(1 - width, length, dtype=jnp.int32)[None]
        readable = readable | ((before > 0) & (before < width))
    since = since_boundary(boundary)
    bits = jnp.zeros((batch, length), jnp.int32)
    for back in range(width):
        reads = mask & jax.lax.slice_in_dim(readable, width - 1 - back, width - 1 - back + length, axis=1)
        if since is not None:
            reads = reads & (since >= back)
        bits = bits | (reads.astype(jnp.int32) << back)
    return bits[:, None]


def prepare(x, weight, bias, past, boundary, mask, activation) -> tuple[Inputs, Options]:
    """The kernels' arguments. Nothing of x's size is made."""
    width = weight.shape[1]
    if width == 1:
        past = None
    last = jnp.zeros_like(weight[:, 0]) if bias is None else bias
    taps = jnp.concatenate([weight.T, last[None]], axis=0)[None]
    if activation == "silu":
        taps = 0.5 * taps
    first = first_real(mask) if mask is not None and past is not None else None
    bits = tap_bits(boundary, mask, first, width)
    if past is not None:
        past = jnp.pad(past.astype(jnp.float32), ((0, 0), (HALO - width + 1, 0), (0, 0)))
    return Inputs(x, taps, past, bits, first), Options(width, bias is not None, activation, mask is not None)


def forward(x, weight, bias, past, boundary, mask, activation, by=by_platform):
    """The outputs, in x's dtype."""
    inputs, options = prepare(x, weight, bias, past, boundary, mask, activation)
    launch = folded(by(partial(conv_forward, options=options), OP))
    return once_differentiable("pallas", "use implementation='chunked'")(launch)(inputs)


def past_gradient(x, weight, bias, past, boundary, mask, activation, dy) -> Float[Array, "B P C"]:
    """Of the initial state, from the first W − 1 real tokens alone: no others read it."""
    size = min(past.shape[1], x.shape[1])
    window: Any
    if mask is None:
        window = [None if a is None else a[:, :size] for a in (x, dy, boundary, mask)]
    else:
        index = first_real(mask)[:, None] + jnp.arange(size, dtype=jnp.int32)[None]
        inside = jnp.minimum(index, x.shape[1] - 1)
        x, dy = (jnp.take_along_axis(a, inside[..., None], axis=1) for a in (x, dy))
        mask = jnp.take_along_axis(mask, inside, axis=1) & (index == inside)
        window = [x, dy, None if boundary is None else jnp.take_along_axis(boundary, inside, axis=1), mask]
    x, dy, boundary, mask = window
    if mask is not None:
        dy = jnp.where(mask[..., None], dy, 0)

    def outputs(past):
        return shifted(x.astype(weight.dtype), weight, bias, past, boundary, mask, activation)

    (gradient,) = jax.vjp(outputs, past.astype(weight.dtype))[1](dy.astype(weight.dtype))
    return gradient.astype(past.dtype)


def backward(x, weight, bias, past, boundary, mask, activation, dy, by=by_platform):
    """Gradients of x, weight, bias and past, as `vjp.gradients` returns them."""
    inputs, options = prepare(x, weight, bias, past, boundary, mask, activation)
    dx, dtaps = folded(by(lambda inputs, dy, interpret: conv_backward(inputs, dy, options, interpret=interpret), OP))(
        inputs, dy
    )
    width = options.width
    dbias = None if bias is None else dtaps[0, width]
    dpast = past if past is None else past_gradient(x, weight, bias, past, boundary, mask, activation, dy)
    return dx, dtaps[0, :width].T, dbias, dpast
