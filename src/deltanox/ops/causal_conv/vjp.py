r"""The hand-derived backward pass of the shifted sum. It keeps the inputs and nothing else.

With p the sum before the activation and d = act'(p) ∘ dy, cut like the taps at segment boundaries:

    dx_t = Σ_w weight[:, w] d_{t+W−1−w}          dweight[:, w] = Σ_t d_t x_{t−W+1+w}          dbias = Σ_t d_t

What it is worth on a CPU (f32 [1, 2048, 6144], W = 4, two cores): JAX's own derivative takes 1,400 ms, most of it in W
column reductions, this one 100 ms. Rows are added in groups of eight, all taps in one pass, and d is computed once.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._derivatives import once_differentiable
from .._kernels import kernel_or
from .._manual import constants
from . import tpu
from .shifted import place, preactivation, row, shifted, since_boundary, tap

Engine = Literal["xla", "pallas", "auto"]

GROUP = 8  # rows that are added in one pass


def sum_rows(arrays: Sequence[Float[Array, "B T C"]]) -> list[Float[Array, " C"]]:
    """Σ over the first two axes of each array, as a tree: exact to a few ulps. One reduction for all, so that what
    they share is read once."""
    arrays = [x.reshape(-1, x.shape[-1]) for x in arrays]
    zeros = [jnp.zeros((), x.dtype) for x in arrays]
    while arrays[0].shape[0] > 1:
        pad = -arrays[0].shape[0] % GROUP
        arrays = [jnp.pad(x, ((0, pad), (0, 0))).reshape(-1, GROUP, x.shape[-1]) for x in arrays]
        arrays = jax.lax.reduce(arrays, zeros, lambda x, y: [a + b for a, b in zip(x, y)], (1,))
    return [x[0] for x in arrays]


def once(f: Callable[[], Array], weight: Float[Array, "C W"]) -> Array:
    """f(), written to memory on a CPU before anything reads it.

    XLA's fusions for the CPU would compute d again for each of the W shifts that read it, sigmoid and taps included,
    and heed no optimisation barrier. They stop at a condition: here, one that only a weight of NaN fails, whose
    gradients are NaN.
    """

    def conditional():
        out = jax.eval_shape(f)

        def never():
            return constants(jnp.full(out.shape, jnp.nan, out.dtype), weight)

        return jax.lax.cond(weight[0, 0] == weight[0, 0], f, never)

    return jax.lax.platform_dependent(cpu=conditional, default=f)


def xla_backward(x, weight, bias, past, boundary, mask, activation, dy):
    """Gradients of x, weight, bias and past."""
    width, accumulate = weight.shape[1], weight.dtype
    if mask is not None:
        dy = jnp.where(mask[..., None], dy, 0)
    (x, past), unplace = jax.vjp(lambda x, past: place(x, past, mask), x, past)
    since = since_boundary(boundary)

    def through_silu():
        pre = preactivation(x, weight, bias, past, since)
        gate = jax.nn.sigmoid(pre)
        return dy.astype(accumulate) * gate * (1 + pre * (1 - gate))

    d = once(through_silu, weight) if activation == "silu" else dy.astype(accumulate)
    length = d.shape[1]
    dx: Any = 0
    dpast: Any = 0
    products = []
    for back in reversed(range(width)):
        products.append(d * tap(x, past, since, back).astype(accumulate))
        # each token's cotangent goes `back` tokens to the left, and over the edge into the past
        here = d if since is None or back == 0 else jnp.where((since >= back)[..., None], d, 0)
        here = here * row(weight, back)
        dx = dx + jnp.pad(here[:, back:], ((0, 0), (0, min(back, length)), (0, 0)))
        if past is not None and back > 0:
            edge, start = here[:, :back], width - 1 - back
            dpast = dpast + jnp.pad(edge, ((0, 0), (start, width - 1 - start - edge.shape[1]), (0, 0)))
    if past is not None:
        dpast = jnp.zeros_like(past) if width == 1 else dpast.astype(past.dtype)
    dx, dpast = unplace((dx.astype(x.dtype), dpast if past is not None else None))
    sums = sum_rows(products if bias is None else [*products, d])
    return dx, jnp.stack(sums[:width], axis=-1), None if bias is None else sums[width], dpast


def _run(engine: Engine, xla: Callable, kernels: Callable, *arrays):
    """One pass on the engine's side: of "auto", the kernels where it is compiled for a TPU."""
    if engine == "auto":
        compiled = partial(kernels, by=lambda kernel, _: partial(kernel, interpret=False))
        return jax.lax.platform_dependent(*arrays, tpu=kernel_or(xla, compiled), default=xla)
    return (kernels if engine == "pallas" else xla)(*arrays)


def _forward(x, weight, bias, past, boundary, mask, activation, engine: Engine):
    def xla(*arrays):
        return shifted(*arrays, activation)

    return _run(engine, xla, partial(tpu.forward, activation=activation), x, weight, bias, past, boundary, mask)


@partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def conv(x, weight, bias, past, boundary, mask, activation, engine: Engine):
    """`shifted`, with the backward pass above, or both as TPU kernels."""
    return _forward(x, weight, bias, past, boundary, mask, activation, engine)


def forward(x, weight, bias, past, boundary, mask, activation, engine):
    # not `conv` itself: forward mode over this pass must reach the sentence in `gradients`
    out = _forward(x, weight, bias, past, boundary, mask, activation, engine)
    return out, (x, weight, bias, past, boundary, mask)


@cache  # one function for all calls: outside `jax.jit` each would compile it again
def _guarded_gradients(activation, engine: Engine):
    @once_differentiable("pallas" if engine == "pallas" else "xla", "use implementation='chunked'")
    def gradients(saved, dy):
        def xla(*arrays):
            return xla_backward(*arrays[:-1], activation, arrays[-1])

        def kernels(*arrays, **options):
            return tpu.backward(*arrays[:-1], activation, arrays[-1], **options)

        return _run(engine, xla, kernels, *saved, dy)

    return gradients


def backward(activation, engine, saved, dy):
    return *_guarded_gradients(activation, engine)(saved, dy), None, None


conv.defvjp(forward, backward)
