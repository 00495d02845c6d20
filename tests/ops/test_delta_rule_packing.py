"""Packed documents and padding in the recurrence, and random draws of everything against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from deltanox.ops import Residuals, gated_delta_rule
from helpers import TOLERANCE, rel

ENGINES = ("chunked", "xla", "reference")


def make(seed, B, T, h, H, K, V, A=0.05):
    rng = np.random.default_rng(seed)  # NumPy's: JAX would compile a generator for every shape

    def normal(*shape):
        return rng.standard_normal((B, *shape), np.float32)

    g, beta = -A * np.log1p(np.exp(normal(T, H))), 1 / (1 + np.exp(-normal(T, H)))
    arrays = (normal(T, h, K), normal(T, h, K), normal(T, H, V), g, beta, normal(H, K, V))
    return tuple(jnp.asarray(x, jnp.float32) for x in arrays)


@functools.partial(jax.jit, static_argnames=("implementation", "chunk_size", "states_every"))
def run(arrays, weights, segment_ids=None, mask=None, *, implementation="xla", chunk_size=16, states_every=2):
    """Output, final state and gradients for the cotangents `weights`."""

    def loss(*arrays):
        *rest, initial_state = arrays
        out, state = gated_delta_rule(
            *rest, initial_state=initial_state, segment_ids=segment_ids, mask=mask, use_qk_l2norm=True,
            implementation=implementation, chunk_size=chunk_size, residuals=Residuals(states_every=states_every),
        )  # fmt: skip
        return jnp.sum(out.astype(jnp.float32) * weights[0]) + jnp.sum(state * weights[1]), (out, state)

    gradients, values = jax.grad(loss, argnums=tuple(range(6)), has_aux=True)(*arrays)
    return [*values, *gradients]


def weights_for(arrays, seed=1):
    rng = np.random.default_rng(seed)
    return tuple(jnp.asarray(rng.standard_normal(x.shape, np.float32)) for x in (arrays[2], arrays[5]))


@pytest.mark.parametrize("implementation", ENGINES)
def test_documents_never_meet(implementation):
    """Cases 7 and 15: documents packed in a row are separate calls, on any backend; slow decay makes a leak large."""
    lengths = [37, 51, 40]
    arrays = make(0, 1, 128, 2, 4, 16, 24)
    ids = jnp.repeat(jnp.arange(3), jnp.array(lengths), total_repeat_length=128)[None]
    weights = weights_for(arrays)
    got = run(arrays, weights, ids, implementation=implementation, chunk_size=64)
    start = 0
    for i, length in enumerate(lengths):
        part = [x[:, start : start + length] for x in arrays[:5]]
        state = arrays[5] if i == 0 else jnp.zeros_like(arrays[5])
        last = i == len(lengths) - 1
        want = run(
            (*part, state),
            (weights[0][:, start : start + length], weights[1] * float(last)),
            implementation="reference",
        )
        for x, y in zip(got[:1] + got[2:7], want[:1] + want[2:7]):
            assert rel(x[:, start : start + length], y) < 1e-6
        if i == 0:
            assert rel(got[7], want[7]) < 1e-6  # the initial state belongs to the first segment
        if last:
            assert rel(got[1], want[1]) < 1e-6  # the final state to the last one
        start += length


@pytest.mark.parametrize("implementation", ENGINES)
def test_documents_are_isolated_bit_for_bit(implementation):
    """Case 7: changing document 1 changes nothing in documents 2 and 3, and no gradient crosses."""
    arrays = make(1, 1, 128, 1, 2, 8, 4)
    ids = jnp.repeat(jnp.arange(3), jnp.array([37, 51, 40]), total_repeat_length=128)[None]
    op = functools.partial(
        gated_delta_rule, segment_ids=ids, initial_state=arrays[5], use_qk_l2norm=True, implementation=implementation
    )
    before, _ = op(*arrays[:5])
    changed = [x.at[:, :37].multiply(0.5) for x in arrays[:5]]
    after, _ = op(*changed)
    np.testing.assert_array_equal(before[:, 37:], after[:, 37:])
    assert np.abs(np.asarray(before - after))[:, :37].max() > 1e-3
    gradients = jax.grad(lambda *a: jnp.sum(op(*a)[0][:, 37:88] ** 2), argnums=tuple(range(5)))(*arrays[:5])
    for x in gradients:
        assert not np.asarray(x[:, :37]).any()
        assert np.asarray(x[:, 37:88]).any()


@pytest.mark.parametrize("positions", [[0, 31], [15, 16, 17], [1, 2, 3, 32], list(range(40))])
def test_boundaries_at_any_place(positions):
    """Boundaries at, before and after the edges of chunks, and segments of one token."""
    arrays = make(2, 1, 40, 1, 2, 8, 4)
    ids = jnp.cumsum(jnp.isin(jnp.arange(40), jnp.array(positions)).astype(jnp.int32))[None]
    weights = weights_for(arrays)
    for x, y in zip(run(arrays, weights, ids), run(arrays, weights, ids, implementation="reference")):
        assert rel(x, y) < 1e-5


def test_many_segments_and_a_padded_tail():
    """Case 11: 3,096 documents of one token and 1,000 pads that belong to none."""
    T = 4096
    arrays = make(3, 1, T, 2, 8, 4, 4)
    tail = jnp.arange(T) < T - 1000
    ids, mask = jnp.where(tail, jnp.arange(T), 0)[None], tail[None]
    out, state = gated_delta_rule(*arrays[:5], segment_ids=ids, mask=mask, use_qk_l2norm=True)
    k = arrays[1] / jnp.sqrt(jnp.sum(arrays[1] ** 2, axis=-1, keepdims=True) + 1e-6)
    q = arrays[0] / jnp.sqrt(jnp.sum(arrays[0] ** 2, axis=-1, keepdims=True) + 1e-6)
    weight = jnp.repeat(jnp.sum(q * k, axis=-1) * 0.5, 4, axis=-1) * arrays[4]
    want = (weight[..., None] * arrays[2]).at[0, 0].set(out[0, 0])  # alone, a token reads what it writes
    assert rel(out[:, : T - 1000], want[:, : T - 1000]) < 1e-5
    assert not np.asarray(out[:, T - 1000 :]).any()
    last = T - 1001
    written = (
        jnp.repeat(k[0, last], 4, axis=0)[:, :, None] * (arrays[4][0, last, :, None] * arrays[2][0, last])[:, None]
    )
    assert rel(state[0], written) < 1e-5


def test_segments_differ_between_rows():
    """Case 10: segment ids of a batch, different in every row, equal the calls row by row."""
    arrays = make(4, 2, 16, 1, 2, 8, 4)
    ids = jnp.array([[0] * 5 + [1] * 11, [3] * 9 + [1] * 2 + [3] * 5])
    weights = weights_for(arrays)
    got = run(arrays, weights, ids)
    for row in range(2):
        one = [x[row : row + 1] for x in arrays]
        want = run(one, [w[row : row + 1] for w in weights], ids[row : row + 1], implementation="reference")
        for x, y in zip(got, want):
            assert rel(x[row : row + 1], y) < 1e-5


@pytest.mark.parametrize(
    ("left", "right", "implementation"),
    [(4, 0, "xla"), (0, 4, "xla"), (17, 3, "xla"), (17, 3, "chunked"), (4, 3, "reference")],
)
def test_padding_is_skipped(left, right, implementation):
    """Cases 1, 2 and 5: batch of one, left or right; outputs, states and gradients are those of the unpadded call;
    NaN stays out."""
    T = 30
    arrays = make(5, 1, T, 1, 2, 8, 4)
    padded = [
        jnp.pad(x, [(0, 0), (left, right)] + [(0, 0)] * (x.ndim - 2), constant_values=jnp.nan) for x in arrays[:5]
    ]
    mask = ((jnp.arange(left + T + right) >= left) & (jnp.arange(left + T + right) < left + T))[None]
    weights = weights_for(arrays)
    wide = jnp.pad(weights[0], [(0, 0), (left, right), (0, 0), (0, 0)], constant_values=7.0)
    got = run((*padded, arrays[5]), (wide, weights[1]), mask=mask, implementation=implementation)
    want = run(arrays, weights, implementation="reference")
    real = slice(left, left + T)
    for name, x, y in zip(("out", "state", "q", "k", "v", "g", "beta", "initial"), got, want):
        if name in ("state", "initial"):
            assert rel(x, y) < 1e-6
        else:
            assert rel(x[:, real], y) < 1e-6
            assert not np.asarray(x[:, :left]).any()
            assert not np.asarray(x[:, left + T :]).any()


def test_ids_of_padding_do_not_count():
    """A pad's segment id is not looked at: the final state stays the last document's, the initial one the first's."""
    arrays = make(6, 1, 20, 1, 2, 8, 4)
    mask = (jnp.arange(20) >= 3) & (jnp.arange(20) < 17) & (jnp.arange(20) != 9)
    ids = jnp.where(jnp.arange(20) < 9, 1, 2)
    weights = weights_for(arrays)
    got = run(arrays, weights, jnp.where(mask, ids, 0)[None], mask[None])
    keep = jnp.flatnonzero(mask)
    want = run(
        (*(x[:, keep] for x in arrays[:5]), arrays[5]), (weights[0][:, keep], weights[1]), ids[keep][None],
        implementation="reference",
    )  # fmt: skip
    for i, (x, y) in enumerate(zip(got, want)):
        assert rel(x if i in (1, 7) else x[:, keep], y) < 1e-5


@st.composite
def calls(draw):
    h, ratio = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    B, T = draw(st.integers(1, 3)), draw(st.integers(1, 70))
    sizes = (B, T, h, h * ratio, draw(st.integers(1, 9)), draw(st.integers(1, 9)))
    seed = draw(st.integers(0, 2**20))
    rng = np.random.default_rng(seed)
    ids = (
        np.cumsum(rng.random((B, T)) < draw(st.sampled_from([0.0, 0.1, 1.0])), axis=1) if draw(st.booleans()) else None
    )
    mask = rng.random((B, T)) < draw(st.sampled_from([0.5, 0.9])) if draw(st.booleans()) else None
    dtype = draw(st.sampled_from(["float32", "bfloat16"]))
    decay = draw(st.sampled_from([0.05, 1.0, 16.0, 100.0]))
    return sizes, seed, ids, mask, dtype, decay, draw(st.sampled_from([1, 4, 16, 64])), draw(st.integers(1, 3))


def check_call(call):
    sizes, seed, ids, mask, dtype, decay, chunk_size, states_every = call
    q, k, v, g, beta, state = make(seed, *sizes, A=decay)
    arrays = tuple(x.astype(dtype) for x in (q, k, v)) + (g, beta, state)
    ids = None if ids is None else jnp.asarray(ids, jnp.int32)
    mask = None if mask is None else jnp.asarray(mask)
    weights = weights_for(arrays)
    want = run(arrays, weights, ids, mask, implementation="reference")
    for implementation in ("chunked", "xla"):
        got = run(
            arrays, weights, ids, mask, implementation=implementation, chunk_size=chunk_size, states_every=states_every
        )
        for i, (x, y) in enumerate(zip(got, want)):
            # a handful of numbers may lie where rounding is relatively large: measured against 1 where they are small
            error = np.linalg.norm(np.float64(x) - np.float64(y)) / max(np.linalg.norm(np.float64(y)), 1.0)
            assert error <= 2 * TOLERANCE[dtype]["gradient"], f"{implementation}, result {i}: {error:.1e}"


@settings(max_examples=4, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls())
def test_random_calls(call):
    check_call(call)


@pytest.mark.slow
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(calls())
def test_many_random_calls(call):
    check_call(call)
