"""From the op's arguments to the TPU kernels and back: gates as rows, columns of merged arrays, a tiling."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .chunked import RESET, Options
from .tiling import CHUNK, LANES, Problem, budget, choose
from .tpu_backward import backward
from .tpu_common import FORGET, PARTS, Columns
from .tpu_forward import forward


class Inputs(NamedTuple):
    """The arguments of the op. `arrays` are q, k, v, [B T h K], [B T h K] and [B T H V], or the one merged array
    [B T 2hK+HV] that has them in its columns."""

    arrays: tuple[Array, ...]
    g: Float[Array, "B T H"]
    beta: Float[Array, "B T H"]
    boundary: Bool[Array, "B T"] | None
    mask: Bool[Array, "B T"] | None


def unsupported(inputs: Inputs, options: Options, value_size: int) -> str | None:
    """Why the kernels cannot take a call, or None."""
    dtype, stride = inputs.arrays[0].dtype, options.chunk_size * options.residuals.states_every
    if dtype not in (jnp.bfloat16, jnp.float32):
        return f"the kernels take bfloat16 and float32, not {dtype}"
    if options.key_size not in (64, 128, 256) or value_size not in (64, 128, 256):
        return f"head sizes must be 64, 128 or 256, but K = {options.key_size} and V = {value_size}"
    if stride % CHUNK:
        return (
            f"states are kept at multiples of {CHUNK} tokens, but chunk_size × residuals.states_every = {stride}: "
            f"set states_every to a multiple of {max(CHUNK // options.chunk_size, 1)}"
        )
    if options.keep_t and options.chunk_size != CHUNK:
        return (
            f"T^-1 is kept for chunks of {CHUNK} tokens, but chunk_size = {options.chunk_size}: set "
            f"chunk_size={CHUNK}, or residuals.t_inv to 'recompute'"
        )
    return None


def _columns(inputs: Inputs, state, options: Options) -> tuple[Columns, Columns, Columns]:
    h, key_size = options.key_heads, options.key_size
    heads, value_size = state.shape[1], state.shape[3]
    arrays = inputs.arrays
    if inputs.mask is not None:  # masked values, NaN included, go no further
        arrays = tuple(jnp.where(inputs.mask.reshape(*inputs.mask.shape, *[1] * (x.ndim - 2)), x, 0) for x in arrays)
    ends = h * key_size, 2 * h * key_size
    if len(arrays) == 1 and h * key_size % LANES == heads * value_size % LANES == 0:
        q = k = v = arrays[0]
        starts = 0, *ends
    else:  # columns that begin amid the lanes are cut by XLA: a copy
        arrays = jnp.split(arrays[0], ends, axis=2) if len(arrays) == 1 else arrays
        q, k, v = (x.reshape(*x.shape[:2], -1) for x in arrays)
        starts = 0, 0, 0
    sizes = (h, key_size), (h, key_size), (heads, value_size)
    q, k, v = (Columns(x, start, *size) for x, start, size in zip((q, k, v), starts, sizes))
    return q, k, v


def _rows(inputs: Inputs) -> tuple[Float[Array, "B H T"], Float[Array, "B H T"]]:
    g, beta = (x.astype(jnp.float32) for x in (inputs.g, inputs.beta))
    boundary, mask = inputs[3:]
    forget = g < RESET
    if boundary is not None:
        forget |= boundary[..., None]
    g = jnp.where(forget, FORGET, g)
    if mask is not None:
        g, beta = (jnp.where(mask[..., None], x, 0) for x in (g, beta))
    return jnp.swapaxes(g, 1, 2), jnp.swapaxes(beta, 1, 2)


def kept_t_dtype(precision: str):
    """Of T^-1 in the record."""
    return jnp.bfloat16 if PARTS[precision].inverse == 1 else jnp.float32


def _settings(kernel: str, inputs: Inputs, state_shape, options: Options, keep: bool = True) -> dict[str, Any]:
    """The kernel's tiling and options."""
    heads, value_size = state_shape[1], state_shape[3]
    length, width = inputs.g.shape[1], inputs.arrays[0].dtype.itemsize
    # no more than there are: tilings depend on it
    every = min(options.chunk_size * options.residuals.states_every // CHUNK, -(-length // CHUNK))
    problem = Problem(
        options.key_heads, heads, options.key_size, value_size, length, every, width,
        jnp.dtype(options.state_dtype).itemsize if keep else 0, kept_t_dtype(options.precision) == jnp.bfloat16,
        keep and options.keep_t,
    )  # fmt: skip
    return dict(
        tiling=choose(kernel, problem), scale=options.scale, eps=options.l2norm_eps, precision=options.precision,
        every=every, vmem=budget(),
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("options", "keep", "interpret"))
def run(inputs: Inputs, state: Float[Array, "B H K V"], *, options: Options, keep: bool, interpret: Any):
    """Output [B T H V], final state and, with `keep`, the states before every n-th chunk [B N H K V] and, where
    the record has it, the inverse of each [B M H C C]: of I + M diag(β), see `tpu_forward.py`."""
    heads, value_size = state.shape[1], state.shape[3]
    out, final, states, u = forward(
        *_columns(inputs, state, options), *_rows(inputs), state,
        **_settings("forward", inputs, state.shape, options, keep), keep=keep,
        keep_u=keep and options.keep_t, kept_dtype=options.state_dtype, interpret=interpret,
    )  # fmt: skip
    return out.reshape(*out.shape[:2], heads, value_size), final, states, u


@functools.partial(jax.jit, static_argnames=("options", "interpret"))
def gradients(inputs: Inputs, states, u, out_bar, state_bar, *, options: Options, interpret: Any):
    """Cotangents of the arrays, of g and beta, and of the initial state, from the record of `run`."""
    mask = inputs.mask
    if mask is not None:
        out_bar = jnp.where(mask[..., None, None], out_bar, 0)
    arrays, g, beta, before = backward(
        *_columns(inputs, state_bar, options), *_rows(inputs), states, u,
        out_bar.reshape(*out_bar.shape[:2], -1), state_bar, overwrite=options.overwrite,
        **_settings("backward", inputs, state_bar.shape, options), interpret=interpret,
    )  # fmt: skip
    g, beta = (jnp.swapaxes(x, 1, 2).astype(like.dtype) for x, like in ((g, inputs.g), (beta, inputs.beta)))
    if len(inputs.arrays) < len(arrays):
        arrays = (jnp.concatenate(arrays, axis=-1),)
    arrays = tuple(x.reshape(like.shape) for x, like in zip(arrays, inputs.arrays))
    if mask is not None:
        g, beta, *arrays = (jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 2)), x, 0) for x in (g, beta, *arrays))
    return tuple(arrays), g, beta, before
