"""Causal attention against a loop over queries in float64 numpy, dense and in blocks."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from deltanox.ops.attention import attention_segments, causal_attention
from helpers import TOLERANCE, rel

run = jax.jit(causal_attention, static_argnames=("block_size", "scale"))


def by_hand(q, k, v, offset=0, query_segments=None, key_segments=None, scale=None):
    """One query after the other, one head after the other."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    T, n, hd = q.shape
    S, m = k.shape[:2]
    scale = hd**-0.5 if scale is None else scale
    out = np.zeros((T, n, v.shape[-1]))
    for t in range(T):
        seen = np.arange(S) <= t + offset
        if query_segments is not None:
            seen &= (np.asarray(key_segments) == int(query_segments[t])) & (np.asarray(key_segments) >= 0)
        if not seen.any():
            continue
        for i in range(n):
            j = i // (n // m)
            score = scale * k[seen, j] @ q[t, i]
            weight = np.exp(score - score.max())
            out[t, i] = (weight / weight.sum()) @ v[seen, j]
    return out


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6), static_argnames=("dtype", "batch"))
def draw(key, T, S, n, m, hd, vd, dtype=jnp.float32, batch=()):
    keys = jax.random.split(key, 3)
    q = jax.random.normal(keys[0], (*batch, T, n, hd), jnp.float32).astype(dtype)
    k = jax.random.normal(keys[1], (*batch, S, m, hd), jnp.float32).astype(dtype)
    v = jax.random.normal(keys[2], (*batch, S, m, vd), jnp.float32).astype(dtype)
    return q, k, v


SEGMENTS = {
    "none": None,
    "packed": ([0] * 4 + [1] * 9 + [2] * 10, [0] * 7 + [1] * 9 + [2] * 13),
    "padded": ([-1, -1, 0, 0, 0, -1] + [0] * 17, [-1] * 3 + [0] * 10 + [-1] + [0] * 15),
}


@pytest.mark.parametrize("block_size", [0, 5, 64])
@pytest.mark.parametrize("segments", SEGMENTS)
def test_values(getkey, block_size, segments):
    T, S, n, m, hd, vd = 23, 29, 6, 2, 5, 7
    q, k, v = draw(getkey(), T, S, n, m, hd, vd)
    ids = SEGMENTS[segments]
    ids = (None, None) if ids is None else tuple(jnp.asarray(x, jnp.int32) for x in ids)
    got = run(q, k, v, offset=6, query_segments=ids[0], key_segments=ids[1], block_size=block_size)
    assert got.shape == (T, n, vd)
    assert rel(got, by_hand(q, k, v, 6, *ids)) < 1e-6


@pytest.mark.parametrize("T, S, offset, n, m", [(1, 9, 8, 3, 3), (2, 9, 7, 4, 1), (8, 16, 8, 2, 2)])
@pytest.mark.parametrize("block_size", [0, 4])
def test_shapes(getkey, T, S, offset, n, m, block_size):
    q, k, v = draw(getkey(), T, S, n, m, 3, 2)
    got = run(q, k, v, offset=offset, block_size=block_size, scale=0.7)
    assert rel(got, by_hand(q, k, v, offset, scale=0.7)) < 1e-6


def test_leading_axes_and_a_batch_of_offsets(getkey):
    q, k, v = draw(getkey(), 5, 8, 4, 2, 3, 3, batch=(2, 3))
    whole = run(q, k, v, offset=3, block_size=2)
    for a, b in np.ndindex(2, 3):
        assert rel(whole[a, b], by_hand(q[a, b], k[a, b], v[a, b], 3)) < 1e-6
    offsets = jnp.asarray([1, 3, 0], jnp.int32)
    mapped = jax.vmap(lambda q, k, v, o: run(q, k, v, offset=o, block_size=2))(q[0], k[0], v[0], offsets)
    for b in range(3):
        assert rel(mapped[b], by_hand(q[0, b], k[0, b], v[0, b], int(offsets[b]))) < 1e-6


@pytest.mark.parametrize("segments", SEGMENTS)
def test_gradients_of_blocks_equal_those_of_the_whole(getkey, segments):
    q, k, v = draw(getkey(), 23, 29, 6, 2, 5, 7)
    ids = SEGMENTS[segments]
    ids = (None, None) if ids is None else tuple(jnp.asarray(x, jnp.int32) for x in ids)
    weight = jax.random.normal(getkey(), (23, 6, 7))

    def gradient(block_size):
        def loss(q, k, v):
            out = causal_attention(q, k, v, offset=6, query_segments=ids[0], key_segments=ids[1], block_size=block_size)
            return jnp.sum(weight * jnp.sin(out))

        return jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(q, k, v)

    want = gradient(0)
    for block_size in (5, 32):
        for a, b in zip(gradient(block_size), want):
            assert rel(a, b) < 2e-6


def test_gradient_of_the_whole_by_differences(getkey):
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float64) for x in draw(getkey(), 4, 6, 2, 1, 3, 2))
        step = [x.astype(jnp.float64) for x in draw(getkey(), 4, 6, 2, 1, 3, 2)]

        @jax.jit
        def loss(q, k, v):
            return jnp.sum(jnp.sin(causal_attention(q, k, v, offset=2)))

        _, got = jax.jvp(loss, (q, k, v), tuple(step))
        h = 1e-5
        up, down = (loss(*(x + s * d for x, d in zip((q, k, v), step))) for s in (h, -h))
        assert abs(float(got) - float((up - down) / (2 * h))) < 1e-7
        assert rel(loss(q, k, v), np.sum(np.sin(by_hand(q, k, v, 2)))) < 1e-13


@pytest.mark.parametrize("block_size", [0, 4])
def test_segments_never_meet_not_even_in_a_gradient(getkey, block_size):
    q, k, v = draw(getkey(), 12, 12, 4, 2, 3, 3)
    ids = attention_segments(jnp.asarray([7] * 5 + [3] * 4 + [7] * 3, jnp.int32), None)
    assert ids.tolist() == [0] * 5 + [1] * 4 + [2] * 3  # an id that comes back is another segment

    def second(q, k, v):
        out = causal_attention(q, k, v, query_segments=ids, key_segments=ids, block_size=block_size)
        return jnp.sum(jnp.sin(out[5:9]))

    for d in jax.jit(jax.grad(second, argnums=(0, 1, 2)))(q, k, v):
        assert np.all(np.asarray(d[:5]) == 0)
        assert np.all(np.asarray(d[9:]) == 0)
        assert np.any(np.asarray(d[5:9]) != 0)


@pytest.mark.parametrize("block_size", [0, 4])
def test_nan_in_padding_stays_out(getkey, block_size):
    q, k, v = draw(getkey(), 10, 10, 2, 1, 3, 3)
    mask = jnp.asarray([False] * 3 + [True] * 5 + [False] * 2)
    ids = attention_segments(None, mask)
    bad = [jnp.where(mask[:, None, None], x, jnp.nan) for x in (q, k, v)]

    def loss(q, k, v):
        out = causal_attention(q, k, v, query_segments=ids, key_segments=ids, block_size=block_size)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*bad)
    assert np.all(np.asarray(out)[~np.asarray(mask)] == 0)
    assert rel(out[3:8], by_hand(q[3:8], k[3:8], v[3:8])) < 1e-6
    for g in grads:
        assert np.all(np.isfinite(np.asarray(g)))
        assert np.all(np.asarray(g)[~np.asarray(mask)] == 0)


@pytest.mark.parametrize("block_size", [0, 4])
def test_large_scores(getkey, block_size):
    """Scores of ±1e4: exp of the raw score is infinite."""
    q, k, v = draw(getkey(), 9, 9, 2, 1, 4, 4)
    q = q * 1e4
    got = run(q, k, v, block_size=block_size)
    assert rel(got, by_hand(q, k, v)) < 1e-5
    loss = jax.jit(
        jax.grad(lambda q, k, v: jnp.sum(causal_attention(q, k, v, block_size=block_size)), argnums=(0, 1, 2))
    )
    grads = loss(q, k, v)
    assert all(np.all(np.isfinite(np.asarray(g))) for g in grads)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("block_size", [0, 8])
def test_narrow_dtypes(getkey, dtype, block_size):
    q, k, v = draw(getkey(), 40, 40, 4, 2, 16, 8, dtype=dtype)
    got = run(q, k, v, block_size=block_size)
    assert got.dtype == jnp.dtype(dtype)
    assert rel(got, by_hand(q, k, v)) < TOLERANCE[dtype]["value"]
    grads = jax.grad(
        lambda q, k, v: jnp.sum(causal_attention(q, k, v, block_size=block_size).astype(jnp.float32)), (0, 1, 2)
    )
    assert [g.dtype for g in jax.eval_shape(grads, q, k, v)] == [jnp.dtype(dtype)] * 3


def test_memory_does_not_grow_with_the_square():
    """At T = 65,536 all scores of one head take 17 GB; the blocks take the size of the inputs."""

    def gradient(q, k, v):
        return jax.grad(lambda *x: jnp.sum(causal_attention(*x)), argnums=(0, 1, 2))(q, k, v)

    def temporary(T):
        q = jax.ShapeDtypeStruct((T, 2, 8), jnp.float32)
        kv = jax.ShapeDtypeStruct((T, 1, 8), jnp.float32)
        return jax.jit(gradient).lower(q, kv, kv).compile().memory_analysis().temp_size_in_bytes

    small, large = temporary(8192), temporary(65536)
    assert large < 9 * small
    assert large < 1e9


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(k=(9, 3, 4), v=(9, 3, 4)), ["n = 4", "m = 3", "multiple"]),
        (dict(k=(9, 2, 5)), ["hd", "float32[9, 2, 5]"]),
        (dict(v=(8, 2, 4)), ["*B S m vd", "float32[8, 2, 4]"]),
    ],
)
def test_refusals(change, words):
    shapes = dict(q=(9, 4, 4), k=(9, 2, 4), v=(9, 2, 4)) | change
    args = {name: jnp.zeros(shape) for name, shape in shapes.items()}
    # the checker speaks first where two axes of one letter differ; tests/nn/test_refusals.py reads our own sentences
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="|".join(map(re.escape, words))):
        causal_attention(**args)


def test_one_kind_of_segments_is_refused():
    q = jnp.zeros((3, 2, 4))
    with pytest.raises(ValueError, match="must be given together"):
        causal_attention(q, q, q, query_segments=jnp.zeros((3,), jnp.int32))


def test_the_platform_chooses_the_blocks(getkey):
    """Without a block size: 300 queries go through blocks, mapped and differentiated, and a TPU program can be lowered
    on a CPU."""
    q, k, v = draw(getkey(), 300, 300, 2, 1, 4, 4, batch=(2,))
    ids = jnp.cumsum(jnp.arange(300) % 90 == 89).astype(jnp.int32)

    def loss(block_size):
        def one(q, k, v):
            return causal_attention(q, k, v, query_segments=ids, key_segments=ids, block_size=block_size)

        return lambda q, k, v: jnp.sum(jnp.sin(jax.vmap(one)(q, k, v)))

    chosen = jax.jit(jax.grad(loss(None), argnums=(0, 1, 2)))
    for a, b in zip(chosen(q, k, v), jax.jit(jax.grad(loss(0), argnums=(0, 1, 2)))(q, k, v)):
        assert rel(a, b) < 2e-6
    assert "stablehlo.while" in chosen.trace(q, k, v).lower(lowering_platforms=("tpu",)).as_text()


def test_a_second_derivative_of_blocks_ends_in_a_sentence(getkey):
    q, k, v = draw(getkey(), 8, 8, 2, 1, 4, 4)
    first = jax.grad(lambda q: jnp.sum(jnp.sin(causal_attention(q, k, v, block_size=4))))
    with pytest.raises(NotImplementedError, match="pass block_size=0 to causal_attention"):
        jax.grad(lambda q: jnp.sum(first(q) ** 2))(q)
