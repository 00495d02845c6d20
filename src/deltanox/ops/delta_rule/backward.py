r"""The backward pass of the chunked rule, derived by hand, in the notation of `chunked.py`.

A chunk gets dO and dS', the cotangents of its output and of the state after it, and the state S before it. With Y = V
− diag(c) K S, so that
N = T diag(β) Y:

    dN = Aᵀ dO + diag(d) K dS'             dA = lower(dO Nᵀ)
    dR = Tᵀ dN                             dM = −strict_lower(dR Nᵀ)           since dT = dN (diag(β) Y)ᵀ and dM = −Tᵀ
    dT Tᵀ
    dV = diag(β) dR
    dX = −diag(β c) dR, dZ = diag(c) dO    cotangents of K S and of scale Q S
    dS = c_C dS' + Kᵀ dX + scale Qᵀ dZ
    dK = dX Sᵀ + diag(d) N dS'ᵀ + (E + Eᵀ) K + Fᵀ scale Q          E = β Γ dM, F = Γ dA
    dQ = scale (dZ Sᵀ + F K)
    dβ_i = dR_i·Y_i + Σ_j dM_ij (k_i·k_j) Γ_ij

Decays: P = dM M + dA A, the pairs j < i only. g_l lies in all spans (j, i] with j < l ≤ i, in c_i for l ≤ i, in d_i
for l > i, in c_C:

    dg_l = Σ_{i ≥ l > j} P_ij + Σ_{i ≥ l} c_i dc_i + Σ_{i < l} d_i dd_i + c_C <S, dS'>
    c_i dc_i = dX_i·(K S)_i + dZ_i·(scale Q S)_i        d_i dd_i = d_i N_i·(K dS')_i

Each sum has its own terms only: none is the difference of two larger ones, which would drown the gradients of strong
gates. At a reset all terms vanish.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from .chunked import (
    Group,
    Options,
    Tokens,
    gather,
    heads_first,
    matmul,
    matmul_t,
    merge_heads,
    per_head,
    row_sums,
    states,
    tokens_first,
    transposed,
    triangle,
)


class Reverse(NamedTuple):
    """What the scan over the chunks of a group gives, last chunk first."""

    state_bar: Float[Array, "n B h K r V"]  # dS', the cotangent of the state after each chunk
    ahead: Float[Array, "n B h C r V"]  # K dS'
    rest_bar: Float[Array, "n B h C r V"]  # dR


def reverse(group: Group, t_t, new_bar, state_add, state_bar, *, precision):
    """Run the chunks backwards. Returns the cotangent of the state before the group, and what each chunk needs."""
    size = group.v.shape[-3]

    def chunk(state_bar, x):
        kq, kq_t, beta, start, end, whole, t_t, new_bar, state_add = x
        ahead = matmul(kq[..., :size, :], merge_heads(state_bar), precision).reshape(new_bar.shape)
        rest_bar = per_head(t_t, new_bar + end[..., None] * ahead, precision)
        met_bar = -(beta * start)[..., None] * rest_bar
        before = matmul(kq_t[..., :size], merge_heads(met_bar), precision).reshape(state_bar.shape)
        return whole[..., None, :, None] * state_bar + before + state_add, Reverse(state_bar, ahead, rest_bar)

    d = group.decay
    xs = (group.kq, group.kq_t, group.beta, d.start, d.end, d.whole, t_t, new_bar, state_add)
    return jax.lax.scan(chunk, state_bar, xs, reverse=True)


def over_heads(x: Float[Array, "... r C C"]) -> Float[Array, "... C C"]:
    """The sum over the value heads of a key head, as additions: XLA's CPU code for a sum over a middle axis is slow."""
    return functools.reduce(jnp.add, (x[..., i, :, :] for i in range(x.shape[-3])))


def decay_gradient(pairs, start_bar, end_bar, whole_bar):
    """dg [n B h r C] from the products P (strictly lower), c dc, d dd [n B h C r] and c_C <S, dS'>."""
    size = pairs.shape[-1]
    ones = jnp.ones((size, size), pairs.dtype)
    before = jnp.matmul(pairs, jnp.triu(ones, 1), precision="highest")  # Σ_{j < l} P_ij
    inside = jax.lax.optimization_barrier(before * jnp.broadcast_to(jnp.tril(ones), before.shape))
    row = jnp.ones((*inside.shape[:-2], 1, size), inside.dtype)
    inside = matmul(row, inside, "highest")[..., 0, :]  # a sum over i, see `row_sums`
    outside = jnp.matmul(jnp.swapaxes(start_bar, -1, -2), jnp.tril(ones), precision="highest")
    outside += jnp.matmul(jnp.swapaxes(end_bar, -1, -2), jnp.triu(ones, 1), precision="highest")
    return inside + outside + whole_bar[..., None]


def backward(
    tokens: Tokens,
    state: Float[Array, "B h K r V"],
    out_bar: Float[Array, "B n C H V"],
    state_bar: Float[Array, "B h K r V"],
    t: Float[Array, "n B h r C C"] | None,
    options: Options,
) -> tuple[Float[Array, "B h K r V"], tuple]:
    """One group: the cotangent of the state before it, and those of q, k, v, g and beta in their dtypes.

    `state` is the state before the group, `state_bar` the cotangent of the state after it; `t` is T where it was kept.
    """
    precision, scale = options.precision, options.scale
    group = gather(tokens, options)
    t = triangle(group) if t is None else t
    run = states(group, t, state, options)[1]
    size, ratio = group.v.shape[-3], group.v.shape[-2]
    decay, beta = group.decay, group.beta
    k, q = group.kq[..., :size, :], group.kq[..., size:, :]

    if tokens.mask is not None:
        out_bar = jnp.where(tokens.mask[..., None, None], out_bar, 0)
    out_bar = heads_first(out_bar.reshape(*out_bar.shape[:3], -1, ratio, out_bar.shape[-1]).astype(beta.dtype))
    new_bar = per_head(transposed(group.a), out_bar, precision)
    read_bar = decay.start[..., None] * out_bar  # dZ
    state_add = matmul(group.kq_t[..., size:], merge_heads(read_bar), precision).reshape(run.states.shape)
    state_bar, back = reverse(group, transposed(t), new_bar, state_add, state_bar, precision=precision)

    met, read = run.from_state[..., :size, :, :], run.from_state[..., size:, :, :]
    met_bar = -(beta * decay.start)[..., None] * back.rest_bar  # dX
    v_bar = beta[..., None] * back.rest_bar

    # the pairs within a chunk: dM over dA, both [n B h r C C]
    both = jnp.concatenate([back.rest_bar, out_bar], axis=-3)
    products = matmul_t(jnp.swapaxes(both, -3, -2), jnp.swapaxes(run.new_values, -3, -2), precision)
    m_bar, a_bar = -products[..., :size, :], products[..., size:, :]
    rate = jnp.swapaxes(beta, -1, -2)[..., None]
    m_bar_pair = m_bar * decay.pair
    gram_bar = over_heads(rate * m_bar_pair)
    lower = decay.pair + jnp.broadcast_to(jnp.eye(size, dtype=beta.dtype), decay.pair.shape)
    query_bar = over_heads(a_bar * lower)
    m_bar_m = m_bar_pair * group.gram[..., None, :, :]  # dM M / β

    wide = merge_heads(jnp.concatenate([met_bar, read_bar], axis=-3))
    kq_bar = matmul_t(wide, run.states.reshape(*run.states.shape[:4], -1), precision)
    ended = merge_heads(decay.end[..., None] * run.new_values)
    k_bar = kq_bar[..., :size, :] + matmul_t(ended, back.state_bar.reshape(*back.state_bar.shape[:4], -1), precision)
    mixed = jnp.concatenate([gram_bar + jnp.swapaxes(gram_bar, -1, -2), jnp.swapaxes(query_bar, -1, -2)], axis=-1)
    k_bar += matmul(mixed, group.kq, precision)
    q_bar = (kq_bar[..., size:, :] + matmul(query_bar, k, precision)) * scale
    if group.norms is not None:
        k_bar = group.norms[0] * (k_bar - k * row_sums(k * k_bar)[..., None])
        unit = q / scale
        q_bar = group.norms[1] * (q_bar - unit * row_sums(unit * q_bar)[..., None])

    rest = group.v - decay.start[..., None] * met
    beta_bar = row_sums(back.rest_bar * rest) + jnp.swapaxes(row_sums(m_bar_m), -1, -2)
    g_bar = decay_gradient(
        rate * m_bar_m + a_bar * decay.pair * group.read[..., None, :, :],
        row_sums(met_bar * met + read_bar * read),
        decay.end * row_sums(run.new_values * back.ahead),
        decay.whole * jnp.sum(run.states * back.state_bar, axis=(-3, -1)),
    )
    g_bar = jnp.swapaxes(jnp.where(decay.reset, 0, g_bar), -1, -2)

    bars = tuple(tokens_first(x) for x in (q_bar, k_bar, v_bar, g_bar, beta_bar))
    bars = tuple(x.reshape(like.shape).astype(like.dtype) for x, like in zip(bars, tokens[:5]))
    if tokens.mask is not None:
        bars = tuple(jnp.where(tokens.mask.reshape(*tokens.mask.shape, *[1] * (x.ndim - 3)), x, 0) for x in bars)
    return state_bar, bars
