"""The gated delta rule as one differentiable op: what the forward pass keeps, and the backward pass that reads it."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .._derivatives import once_differentiable
from .backward import backward
from .chunked import Plan, Tokens, carried, carry_dtype, forward, join, plan, returned, split
from .residuals import Residuals


class Options(NamedTuple):
    """What is compiled into the op. Hashable."""

    scale: float
    l2norm_eps: float | None
    chunk_size: int
    precision: str
    state_dtype: jnp.dtype
    residuals: Residuals


class Saved(NamedTuple):
    """What the forward pass keeps, besides the arguments. `G` groups of `n` chunks (`Residuals.states_every`, evened out)."""

    states: Float[Array, "G B H K V"]  # before each group, in `state_dtype`
    t_inv: Float[Array, "G n B h r C C"] | None
    out: Float[Array, "B T H V"] | None


def _plan(options: Options, tokens: Tokens) -> Plan:
    return plan(tokens.q.shape[1], options.chunk_size, options.residuals.states_every)


def _split(tokens: Tokens, p: Plan) -> Tokens:
    return Tokens(*(None if x is None else split(x, p) for x in tokens))


def _run(options: Options, tokens: Tokens, initial_state, *, keep: bool):
    """Output, final state and, with `keep`, the record."""
    p = _plan(options, tokens)
    save_t = keep and options.residuals.t_inv == "save"

    def group(state, tokens):
        after, (out, t) = forward(
            tokens, state, scale=options.scale, l2norm_eps=options.l2norm_eps, precision=options.precision,
            state_dtype=carry_dtype(options.state_dtype, state.dtype), dtype=tokens.v.dtype,
        )  # fmt: skip
        before = returned(state).astype(_kept(options, state.dtype)) if keep else None
        return after, (out, before, t if save_t else None)

    state, (out, states, t) = jax.lax.scan(group, carried(initial_state, tokens.k.shape[2]), _split(tokens, p))
    out = join(out, p)
    saved = Saved(states, t, out if options.residuals.out == "save" else None) if keep else None
    return out, returned(state), saved


def _kept(options: Options, accumulate):
    """States are kept in `state_dtype`, but never narrower than they were carried: float64 stays float64."""
    return accumulate if options.state_dtype == jnp.float32 else options.state_dtype


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rule(options: Options, tokens: Tokens, initial_state):
    return _run(options, tokens, initial_state, keep=False)[:2]


def _forward(options: Options, tokens: Tokens, initial_state):
    out, state, saved = _run(options, tokens, initial_state, keep=True)
    return (out, state), (tokens, saved)


def _backward(options: Options, kept, cotangents):
    tokens, saved = kept
    return _gradients(options)(tokens, saved.states, saved.t_inv, cotangents)


def _gradients(options: Options):
    @once_differentiable("xla", "use implementation='chunked'")
    def gradients(tokens, states, t_inv, cotangents):
        p = _plan(options, tokens)
        out_bar, state_bar = cotangents

        def group(state_bar, x):
            tokens, state, t, out_bar = x
            return backward(
                tokens, carried(state.astype(state_bar.dtype), tokens.k.shape[-2]), out_bar, state_bar, scale=options.scale,
                l2norm_eps=options.l2norm_eps, precision=options.precision, state_dtype=carry_dtype(options.state_dtype, state_bar.dtype), t=t,
            )  # fmt: skip

        xs = (_split(tokens, p), states, t_inv, split(out_bar, p))
        state_bar, bars = jax.lax.scan(group, carried(state_bar, tokens.k.shape[2]), xs, reverse=True)
        return Tokens(*(join(x, p) for x in bars), None, None), returned(state_bar)

    return gradients


_rule.defvjp(_forward, _backward)


def xla(q, k, v, g, beta, initial_state, boundary, mask, *, scale, l2norm_eps, chunk_size, precision, state_dtype, residuals):
    """The chunked rule with the hand-derived backward pass. Arguments as the engines of `op.py` take them."""
    options = Options(scale, l2norm_eps, chunk_size, precision, state_dtype, residuals)
    return _rule(options, Tokens(q, k, v, g, beta, boundary, mask), initial_state)
