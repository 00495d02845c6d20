"""Causal attention with grouped heads, packed and padded sequences, in memory that is linear in the number of
tokens."""

from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from .._types import Number
from ._compiled import compiled
from ._derivatives import once_differentiable
from ._dtypes import accumulator
from ._manual import alike, constants
from ._segments import boundaries
from ._validate import require, require_array, require_number, require_size, require_tokens, shapes

NEVER = -1
"""Segment of padding: seen by nothing, and seeing nothing."""

_DENSE_SCORES = 256 * 256
"""Up to so many scores a head, all of them are held at once: differentiable any number of times, and as fast as
blocks."""

_CPU_BLOCK, _BLOCK = 128, 512
"""Queries and keys of a block: on a CPU its scores stay in the cache (at T = 512 five times faster than all scores at
once)."""

# A score no real one comes near and exp of which is zero; finite, so that a row without keys gives no inf - inf.
_LOW = -1e30


def attention_segments(segment_ids: Int[Array, "*B T"] | None, mask: Array | None) -> Int[Array, "*B T"] | None:
    """Numbers 0, 1, 2 ... of the segments, `NEVER` at padding, None where there is neither packing nor padding.

    A segment ends at any change of the id between neighbouring real tokens, so that ids that come back (0, 1, 0) are
    three.
    """
    if segment_ids is None and mask is None:
        return None
    require_tokens("attention_segments", segment_ids=segment_ids, mask=mask)
    starts = boundaries(segment_ids, mask)
    number = jnp.zeros((), jnp.int32) if starts is None else jnp.cumsum(starts.astype(jnp.int32), axis=-1)
    return number if mask is None else jnp.where(mask, number, NEVER)


def causal_attention(
    q: Float[Array, "*B T n hd"],
    k: Float[Array, "*B S m hd"],
    v: Float[Array, "*B S m vd"],
    *,
    offset: int | Int[Array, ""] = 0,
    query_segments: Int[Array, "*B T"] | None = None,
    key_segments: Int[Array, "*B S"] | None = None,
    scale: Number | None = None,
    block_size: int | None = None,
) -> Float[Array, "*B T n vd"]:
    """out_t = Σ_s softmax_s(scale · q_t·k_s) v_s over the keys s ≤ t + offset of t's segment.

    Scores and softmax are evaluated in float32 (float64 for float64 inputs); the weights are rounded to v's dtype for
    the second product. Products have the precision of `jax_default_matmul_precision`. Query head i reads key head
    i // (n/m); keys and values are not repeated in memory.

    **Arguments:**

    - `q`: queries; `k`: keys; `v`: values. n must be a multiple of m. Nothing is normalised or rotated here.
    - `offset`: number of key slots before the first query's own: query t sees the slots up to t + offset. The number of
        cached tokens, for a cache; 0 where keys and queries are of the same tokens.
    - `query_segments`, `key_segments`: both or neither. A query sees the keys of an equal number; a negative one is
        padding, which sees nothing (its output is zero) and isn't seen, even if it holds NaN. `attention_segments`
        makes them.
    - `scale`: hd^-0.5 unless given.
    - `block_size`: 0 holds all T·S scores a head at once; it has forward mode and derivatives of any order. A positive
        number works through blocks of so many queries and keys, skips those that lie in the future, and recomputes the
        scores in the backward pass: memory is linear in T and S; reverse mode only, once. None is 0 up to 256² scores
        or for one query, and beyond them blocks of a size that suits the platform that is compiled for.

    **Returns:** [*B T n vd] in v's dtype.

    **Raises:** `ValueError` for wrong ranks or dtypes, heads that don't divide, lengths or batch axes that differ, and
    one kind of segments without the other.

    Source: arXiv:1706.03762; grouped heads arXiv:2305.13245; blocks arXiv:2205.14135.
    """
    _check(q, k, v, offset, query_segments, key_segments, block_size)
    scale = None if scale is None else require_number("causal_attention", "scale", scale)
    offset = jnp.asarray(offset, jnp.int32)
    return _attend(q, k, v, offset, query_segments, key_segments, scale=scale, block_size=block_size)


@compiled("scale", "block_size")
def _attend(q, k, v, offset, query_segments, key_segments, *, scale, block_size):
    *batch, T, n, hd = q.shape
    S, m = k.shape[-3:-1]
    if scale is None:
        scale = hd**-0.5
    if block_size is None:
        block_size = 0 if T * S <= _DENSE_SCORES or T == 1 else None
    if query_segments is not None and key_segments is not None:
        # 0 · NaN is NaN: what padding holds must go before the products, not after
        q = jnp.where((query_segments >= 0)[..., None, None], q, jnp.zeros((), q.dtype))
        real = (key_segments >= 0)[..., None, None]
        k = jnp.where(real, k, jnp.zeros((), k.dtype))
        v = jnp.where(real, v, jnp.zeros((), v.dtype))
    q = jnp.moveaxis(q.reshape(*batch, T, m, n // m, hd), -4, -2)
    k, v = jnp.moveaxis(k, -3, -2), jnp.moveaxis(v, -3, -2)
    if block_size == 0:
        out = checkpoint_name(_dense(q, k, v, offset, query_segments, key_segments, scale), "attention_out")
    else:
        arrays = alike((q, k, v, offset, query_segments, key_segments))
        out = _flash((scale, block_size), *arrays)
    return jnp.moveaxis(out, -2, -4).reshape(*batch, T, n, v.shape[-1])  # pyright: ignore[reportArgumentType]


def _check(q, k, v, offset, query_segments, key_segments, block_size) -> None:
    op = "causal_attention"
    if not hasattr(offset, "dtype"):
        require_size(op, "offset", offset, least=0)
    for name, x, axes in (("q", q, "*B T n hd"), ("k", k, "*B S m hd"), ("v", v, "*B S m vd")):
        require_array(op, name, x, axes)
    received = shapes(q=q, k=k, v=v)
    require(
        q.dtype == k.dtype == v.dtype, f"{op}: `q`, `k` and `v` must have one dtype, but received {received}: cast them"
    )
    require(
        q.shape[:-3] == k.shape[:-3] == v.shape[:-3]
        and k.shape[-3:-1] == v.shape[-3:-1]
        and q.shape[-1] == k.shape[-1],
        f"{op}: `q` [*B T n hd], `k` [*B S m hd] and `v` [*B S m vd] must agree in *B, S, m and hd, but received "
        f"{received}: "
        "heads come after tokens; move them with jnp.moveaxis(x, -3, -2)",
    )
    require(
        q.shape[-2] % k.shape[-2] == 0,
        f"{op}: the number of query heads n = {q.shape[-2]} must be a multiple of the key heads m = {k.shape[-2]}, but "
        "received "
        f"{received}: heads come after tokens, `*B T n hd`",
    )
    require(
        not isinstance(offset, int) or k.shape[-3] >= q.shape[-3] + offset,
        f"{op}: every query's own key must be there, S ≥ T + offset, but received {received} with offset = {offset}: "
        "tokens come "
        "before heads, `*B T n hd`, and cached keys before new ones",
    )
    require(
        (query_segments is None) == (key_segments is None),
        f"{op}: `query_segments` and `key_segments` must be given together: pass the same array twice where keys and "
        "queries "
        "are of the same tokens",
    )
    if query_segments is not None:
        received = shapes(q=q, k=k, query_segments=query_segments, key_segments=key_segments)
        for name, ids in (("query_segments", query_segments), ("key_segments", key_segments)):
            require_array(op, name, ids, "*B T", kind="integer")
        require(
            query_segments.shape == q.shape[:-2] and key_segments.shape == k.shape[:-2],
            f"{op}: `query_segments` must be [*B T] of q and `key_segments` [*B S] of k, but received {received}",
        )
    if block_size is not None:
        require_size(op, "block_size", block_size, least=0)  # 0: no blocks


def _visible(t, s, offset, query_segments, key_segments):
    """bool [*B T S] (or [T S]): which slots `s` the queries `t` see."""
    past = s[None, :] <= t[:, None] + offset
    if query_segments is None:
        return past
    same = (query_segments[..., :, None] == key_segments[..., None, :]) & (key_segments >= 0)[..., None, :]
    return same & past[(None,) * (same.ndim - 2)]


def _scores(q, k, scale):
    """[*B m r T S], in float32 or wider."""
    wide = accumulator(q.dtype)
    return jnp.einsum("...grtk,...gsk->...grts", q, k, preferred_element_type=wide) * jnp.asarray(scale, wide)


def _over_heads(visible, scores):
    """`visible` with the two head axes of the scores, in their shape."""
    visible = visible[..., None, None, :, :]
    return jnp.broadcast_to(visible[(None,) * (scores.ndim - visible.ndim)], scores.shape)


def _dense(q, k, v, offset, query_segments, key_segments, scale):
    wide = accumulator(q.dtype)
    scores = _scores(q, k, scale)
    T, S = scores.shape[-2:]
    visible = _over_heads(
        _visible(jnp.arange(T, dtype=jnp.int32), jnp.arange(S, dtype=jnp.int32), offset, query_segments, key_segments),
        scores,
    )
    scores = jnp.where(visible, scores, jnp.asarray(_LOW, wide))
    peak = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - peak)
    if query_segments is not None:
        # only padding sees no key at all; elsewhere exp has made the zeros already
        weights = jnp.where(visible, weights, jnp.zeros((), wide))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = jnp.einsum("...grts,...gsv->...grtv", weights.astype(v.dtype), v, preferred_element_type=wide)
    return (out / jnp.where(total > 0, total, jnp.ones((), wide))).astype(v.dtype)


# Block by block --------------------


def _pad(x, more, axis, value=0):
    if more == 0:
        return x
    width = [(0, 0)] * x.ndim
    width[axis % x.ndim] = (0, more)
    return jnp.pad(x, width, constant_values=value)


def _take(x: Array, i, size: int, axis: int) -> Array:
    """Block number i of `size` along `axis`, counted from the end."""
    return jax.lax.dynamic_slice_in_dim(x, i * size, size, x.ndim + axis)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _flash(static, q, k, v, offset, query_segments, key_segments):
    return _flash_forward(static, q, k, v, offset, query_segments, key_segments)[0]


def _flash_forward(static, *args):
    out, log_total = _on_platform(_forward_blocks, static, *args)
    out, log_total = checkpoint_name(out, "attention_out"), checkpoint_name(log_total, "attention_lse")
    return out, (*args, out, log_total)


def _flash_backward(static, saved, d_out):
    return (*_backward(static, *saved, d_out), None, None, None)


_flash.defvjp(_flash_forward, _flash_backward)


def _backward(static, *args):
    return _guarded_backward(static)(*args)


@cache  # one function for all calls: outside `jax.jit` each would compile it again
def _guarded_backward(static):
    once = once_differentiable("blocks", "pass block_size=0 to causal_attention")
    return once(partial(_on_platform, _backward_blocks, static))


def _on_platform(f, static, *args):
    """f(scale, block size, *args) with the given block size, or with the one of the platform that is compiled for."""
    scale, block_size = static
    if block_size is not None:
        return f(scale, block_size, *args)
    return jax.lax.platform_dependent(*args, cpu=partial(f, scale, _CPU_BLOCK), default=partial(f, scale, _BLOCK))


def _pad_to_blocks(block_size, q, k, v, query_segments, key_segments):
    """T and S rounded up to whole blocks, with queries that see nothing and keys that nobody sees; the sizes of a
    block."""
    T, S = q.shape[-2], k.shape[-2]
    tq, ts = min(block_size, T), min(block_size, S)
    more_q, more_k = -T % tq, -S % ts
    if more_k and key_segments is None:
        query_segments = jnp.zeros((*q.shape[:-4], T), jnp.int32)
        key_segments = jnp.zeros((*q.shape[:-4], S), jnp.int32)
    q, k, v = _pad(q, more_q, -2), _pad(k, more_k, -2), _pad(v, more_k, -2)
    if query_segments is not None:
        query_segments, key_segments = _pad(query_segments, more_q, -1, NEVER), _pad(key_segments, more_k, -1, NEVER)
    return (tq, ts), (q, k, v, query_segments, key_segments)


def _block_visible(i, j, tq, ts, offset, query_segments, key_segments):
    t = i * tq + jnp.arange(tq, dtype=jnp.int32)
    s = j * ts + jnp.arange(ts, dtype=jnp.int32)
    if query_segments is None:
        return _visible(t, s, offset, None, None)
    return _visible(t, s, offset, _take(query_segments, i, tq, -1), _take(key_segments, j, ts, -1))


def _forward_blocks(scale, block_size, q, k, v, offset, query_segments, key_segments):
    """The output, and the logarithm of Σ_s exp(score) of every query."""
    T = q.shape[-2]
    (tq, ts), (q, k, v, query_segments, key_segments) = _pad_to_blocks(
        block_size, q, k, v, query_segments, key_segments
    )
    wide = accumulator(q.dtype)
    nq, nk = q.shape[-2] // tq, k.shape[-2] // ts

    def one_query_block(_, i):
        block = _take(q, i, tq, -2)

        def one_key_block(j, carry):
            peak, total, out = carry
            scores = _scores(block, _take(k, j, ts, -2), scale)
            visible = _over_heads(_block_visible(i, j, tq, ts, offset, query_segments, key_segments), scores)
            scores = jnp.where(visible, scores, jnp.asarray(_LOW, wide))
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1, keepdims=True))
            weights = jnp.where(visible, jnp.exp(scores - new_peak), jnp.zeros((), wide))
            shrink = jnp.exp(peak - new_peak)
            total = total * shrink + jnp.sum(weights, axis=-1, keepdims=True)
            values = _take(v, j, ts, -2)
            more = jnp.einsum("...grts,...gsv->...grtv", weights.astype(v.dtype), values, preferred_element_type=wide)
            return new_peak, total, out * shrink + more

        shape = block.shape[:-1]
        empty = (
            jnp.full((*shape, 1), _LOW, wide),
            jnp.zeros((*shape, 1), wide),
            jnp.zeros((*shape, v.shape[-1]), wide),
        )
        end = jnp.minimum(nk, (offset + (i + 1) * tq - 1) // ts + 1)
        peak, total, out = jax.lax.fori_loop(0, end, one_key_block, constants(empty, q))
        seen = total > 0
        total = jnp.where(seen, total, jnp.ones((), wide))
        # padding keeps a logarithm so large that its weights are zero in the backward pass as well
        log_total = jnp.where(seen, peak + jnp.log(total), jnp.asarray(-_LOW, wide))
        return None, ((out / total).astype(v.dtype), log_total)

    _, (out, log_total) = jax.lax.scan(one_query_block, None, jnp.arange(nq, dtype=jnp.int32))
    return _join(out)[..., :T, :], _join(log_total)[..., :T, :]


def _join(blocks):
    """[n *B t c] -> [*B n·t c]"""
    x = jnp.moveaxis(blocks, 0, -3)
    return x.reshape(*x.shape[:-3], x.shape[-3] * x.shape[-2], x.shape[-1])


def _backward_blocks(scale, block_size, q, k, v, offset, query_segments, key_segments, out, log_total, d_out):
    """Gradients of q, k and v."""
    T, S = q.shape[-2], k.shape[-2]
    (tq, ts), (q, k, v, query_segments, key_segments) = _pad_to_blocks(
        block_size, q, k, v, query_segments, key_segments
    )
    # without packing a padded query sees keys, but its cotangent is zero
    out, log_total, d_out = (_pad(x, -T % tq, -2) for x in (out, log_total, d_out))
    wide = accumulator(q.dtype)
    nq, nk = q.shape[-2] // tq, k.shape[-2] // ts
    # Σ_s weight · d_weight of every query, from the output alone
    inner = jnp.sum(out.astype(wide) * d_out.astype(wide), axis=-1, keepdims=True)

    def one_key_block(d_q, j):
        keys, values = _take(k, j, ts, -2), _take(v, j, ts, -2)

        def one_query_block(i, carry):
            d_q, d_k, d_v = carry
            queries, d_block = _take(q, i, tq, -2), _take(d_out, i, tq, -2)
            scores = _scores(queries, keys, scale)
            visible = _over_heads(_block_visible(i, j, tq, ts, offset, query_segments, key_segments), scores)
            scores = jnp.where(visible, scores, jnp.asarray(_LOW, wide))
            weights = jnp.where(visible, jnp.exp(scores - _take(log_total, i, tq, -2)), jnp.zeros((), wide))
            narrow = weights.astype(v.dtype)
            d_v = d_v + jnp.einsum("...grts,...grtv->...gsv", narrow, d_block, preferred_element_type=wide)
            d_weights = jnp.einsum("...grtv,...gsv->...grts", d_block, values, preferred_element_type=wide)
            d_scores = weights * (d_weights - _take(inner, i, tq, -2)) * jnp.asarray(scale, wide)
            d_scores = d_scores.astype(q.dtype)
            d_k = d_k + jnp.einsum("...grts,...grtk->...gsk", d_scores, queries, preferred_element_type=wide)
            more = jnp.einsum("...grts,...gsk->...grtk", d_scores, keys, preferred_element_type=wide)
            more = _take(d_q, i, tq, -2) + more
            return jax.lax.dynamic_update_slice_in_dim(d_q, more, i * tq, d_q.ndim - 2), d_k, d_v

        # the first block with a query that sees this block's first key
        start = jnp.maximum(0, (j * ts - offset) // tq)
        empty = constants((jnp.zeros(keys.shape, wide), jnp.zeros(values.shape, wide)), q)
        d_q, d_k, d_v = jax.lax.fori_loop(start, nq, one_query_block, (d_q, *empty))
        return d_q, (d_k.astype(k.dtype), d_v.astype(v.dtype))

    nothing = constants(jnp.zeros(q.shape, wide), q)
    d_q, (d_k, d_v) = jax.lax.scan(one_key_block, nothing, jnp.arange(nk, dtype=jnp.int32))
    return d_q[..., :T, :].astype(q.dtype), _join(d_k)[..., :S, :], _join(d_v)[..., :S, :]
