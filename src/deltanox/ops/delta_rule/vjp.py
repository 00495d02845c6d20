"""The gated delta rule as one differentiable op: what the forward pass keeps, and the backward pass that reads it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._derivatives import once_differentiable
from .backward import backward
from .chunked import Options, Tokens, carried, forward, join, plan, returned, split


class Saved(NamedTuple):
    """What the forward pass keeps, besides the arguments: G groups of n chunks (`Residuals.states_every`, evened
    out)."""

    states: Float[Array, "G B H K V"]  # before each group, in `state_dtype`
    t_inv: Float[Array, "G n B h r C C"] | None
    out: Float[Array, "B T H V"] | None


def _run(options: Options, tokens: Tokens, initial_state, *, keep: bool):
    """Output, final state and, with `keep`, the record."""
    p = plan(tokens.q.shape[1], options)
    accumulate = initial_state.dtype  # states are kept in `state_dtype`, but float64 stays float64
    kept_dtype = accumulate if options.state_dtype == jnp.float32 else options.state_dtype

    def group(state, tokens):
        after, out, t = forward(tokens, state, options)
        kept = (returned(state).astype(kept_dtype), t if options.residuals.t_inv == "save" else None) if keep else None
        return after, (out, kept)

    state, (out, kept) = jax.lax.scan(group, carried(initial_state, tokens.k.shape[2]), split(tokens, p))
    out = join(out, p)
    saved = None if kept is None else Saved(*kept, out if options.residuals.out == "save" else None)
    return out, returned(state), saved


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(options: Options, tokens: Tokens, initial_state):
    return _run(options, tokens, initial_state, keep=False)[:2]


def _forward(options: Options, tokens: Tokens, initial_state):
    out, state, saved = _run(options, tokens, initial_state, keep=True)
    return (out, state), (tokens, saved)


def _backward(options: Options, kept, cotangents):
    @once_differentiable("xla", "use implementation='chunked'")
    def gradients(tokens, saved, cotangents):
        p = plan(tokens.q.shape[1], options)
        out_bar, state_bar = cotangents

        def group(state_bar, x):
            tokens, state, t, out_bar = x
            state = carried(state.astype(state_bar.dtype), tokens.k.shape[-2])
            return backward(tokens, state, out_bar, state_bar, t, options)

        xs = (*split((tokens,), p), saved.states, saved.t_inv, split(out_bar, p))
        state_bar, bars = jax.lax.scan(group, carried(state_bar, tokens.k.shape[2]), xs, reverse=True)
        return Tokens(*(join(x, p) for x in bars), None, None), returned(state_bar)

    return gradients(*kept, cotangents)


_rule.defvjp(_forward, _backward)


def xla(q, k, v, g, beta, initial_state, boundary, mask, options: Options):
    """The chunked rule with the hand-derived backward pass. Arguments as the engines of `op.py` take them."""
    return _rule(options, Tokens(q, k, v, g, beta, boundary, mask), initial_state)
