"""The gated delta rule as one differentiable op: what the forward pass keeps, and the backward pass that reads it.

Two engines stand behind it, XLA's code and the TPU kernels, with one interface and one record.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from .._derivatives import once_differentiable
from .._dtypes import accumulator
from .._kernels import on_engine
from . import tpu
from .backward import backward
from .chunked import Options, Plan, Tokens, carried, forward, join, plan, returned, split
from .tpu import Inputs


class Saved(NamedTuple):
    """What the forward pass keeps, besides the arguments: G groups of n chunks (`Residuals.states_every`)."""

    states: Float[Array, "B G H K V"]  # before each group, in `state_dtype`
    t_inv: Float[Array, "B N H C C"] | None  # of each chunk, as the engine that ran needs it
    out: Float[Array, "B T H V"] | None


def split_merged(qkv: Float[Array, "*B C"], key_heads: int, key_size: int, heads: int) -> list[Array]:
    """The merged array as q, k [*B h K] and v [*B H V]."""
    keys = key_heads * key_size
    parts = jnp.split(qkv, (keys, 2 * keys), axis=-1)
    return [x.reshape(*x.shape[:-1], n, x.shape[-1] // n) for x, n in zip(parts, (key_heads, key_heads, heads))]


def unmerged(inputs: Inputs, heads: int, options: Options) -> Tokens:
    """The arguments with an axis of heads."""
    arrays = inputs.arrays
    if len(arrays) == 1:
        arrays = split_merged(arrays[0], options.key_heads, options.key_size, heads)
    accumulate = accumulator(arrays[0].dtype)
    return Tokens(*arrays, *(x.astype(accumulate) for x in (inputs.g, inputs.beta)), inputs.boundary, inputs.mask)


def _joined_t(t: Float[Array, "G n B h r C C"], p: Plan) -> Float[Array, "B N H C C"]:
    """One axis of chunks, the padding's left out, and one of heads."""
    groups, chunks, batch, h, r, size, _ = t.shape
    t = jnp.moveaxis(t, 2, 0).reshape(batch, groups * chunks, h * r, size, size)
    return t[:, : -(-p.length // p.size)]


def _split_t(t: Float[Array, "B N H C C"], p: Plan, key_heads: int) -> Float[Array, "G n B h r C C"]:
    t = jnp.pad(t, ((0, 0), (0, p.groups * p.chunks - t.shape[1]), *[(0, 0)] * 3))
    t = t.reshape(t.shape[0], p.groups, p.chunks, key_heads, -1, p.size, p.size)
    return jnp.moveaxis(t, 0, 2)


def _run_xla(inputs: Inputs, initial_state, *, options: Options, keep: bool):
    """Output, final state and, with `keep`, the states and T."""
    tokens = unmerged(inputs, initial_state.shape[1], options)
    p = plan(tokens.q.shape[1], options)
    accumulate = initial_state.dtype  # states are kept in `state_dtype`, but float64 stays float64
    kept_dtype = accumulate if options.state_dtype == jnp.float32 else options.state_dtype

    def group(state, tokens):
        after, out, t = forward(tokens, state, options)
        t = t if keep and options.keep_t else None
        return after, (out, returned(state).astype(kept_dtype) if keep else None, t)

    state, (out, states, t_inv) = jax.lax.scan(group, carried(initial_state, tokens.k.shape[2]), split(tokens, p))
    if t_inv is not None:
        t_inv = _joined_t(t_inv, p)
        t_inv = t_inv.astype(tpu.kept_t_dtype(options.precision)) if options.engine == "auto" else t_inv
    return join(out, p), returned(state), None if states is None else jnp.moveaxis(states, 0, 1), t_inv


def _run(options: Options, inputs: Inputs, initial_state, *, keep: bool):
    def xla(inputs, state):
        return _run_xla(inputs, state, options=options, keep=keep)

    def kernel(inputs, state, *, interpret):
        return tpu.run(inputs, state, options=options, keep=keep, interpret=interpret)

    return on_engine(options.engine, "gated_delta_rule", xla, kernel, inputs, initial_state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def rule(options: Options, inputs: Inputs, initial_state: Float[Array, "B H K V"]):
    """Output [B T H V] and final state [B H K V]."""
    return _run(options, inputs, initial_state, keep=False)[:2]


@functools.cache  # one function for all calls: outside `jax.jit` each would compile it again
def _guarded(f, options: Options):
    implementation = "pallas" if options.engine == "pallas" else "xla"
    return once_differentiable(implementation, "use implementation='chunked'")(functools.partial(f, options))


def _run_keeping(options: Options, inputs: Inputs, initial_state):
    return _run(options, inputs, initial_state, keep=True)


def _forward(options: Options, inputs: Inputs, initial_state):
    # XLA's code could be differentiated here, the kernels cannot: the sentence comes first
    run = functools.partial(_run_keeping, options) if options.engine == "xla" else _guarded(_run_keeping, options)
    out, state, states, t_inv = run(inputs, initial_state)
    out, states = checkpoint_name(out, "gdn_out"), checkpoint_name(states, "gdn_states")
    t_inv = None if t_inv is None else checkpoint_name(t_inv, "gdn_t_inv")
    saved = Saved(states, t_inv, out if options.residuals.out == "save" else None)
    return (out, state), (inputs, saved)


def _gradients_xla(inputs: Inputs, saved: Saved, out_bar, state_bar, *, options: Options):
    tokens = unmerged(inputs, state_bar.shape[1], options)
    p = plan(tokens.q.shape[1], options)

    def group(state_bar, x):
        tokens, state, t, out_bar = x
        state = carried(state.astype(state_bar.dtype), tokens.k.shape[-2])
        return backward(tokens, state, out_bar, state_bar, t, options)

    t = None if saved.t_inv is None else _split_t(saved.t_inv.astype(state_bar.dtype), p, tokens.k.shape[2])
    xs = (*split((tokens,), p), jnp.moveaxis(saved.states, 1, 0), t, split(out_bar, p))
    state_bar, bars = jax.lax.scan(group, carried(state_bar, tokens.k.shape[2]), xs, reverse=True)
    *arrays, g, beta = (join(x, p) for x in bars)
    g, beta = g.astype(inputs.g.dtype), beta.astype(inputs.beta.dtype)
    if len(inputs.arrays) == 1:
        arrays = [jnp.concatenate([x.reshape(*x.shape[:2], -1) for x in arrays], axis=-1)]
    return tuple(arrays), g, beta, returned(state_bar)


def _gradients(options: Options, inputs: Inputs, saved: Saved, cotangents):
    def xla(inputs, saved, out_bar, state_bar):
        return _gradients_xla(inputs, saved, out_bar, state_bar, options=options)

    def kernel(inputs, saved, out_bar, state_bar, *, interpret):
        return tpu.gradients(inputs, *saved[:2], out_bar, state_bar, options=options, interpret=interpret)

    arguments = (inputs, saved._replace(out=None), *cotangents)
    arrays, g, beta, state_bar = on_engine(options.engine, "gated_delta_rule", xla, kernel, *arguments)
    return Inputs(arrays, g, beta, None, None), state_bar


def _backward(options: Options, kept, cotangents):
    return _guarded(_gradients, options)(*kept, cotangents)


rule.defvjp(_forward, _backward)
