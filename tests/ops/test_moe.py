"""Routing and expert products against every expert applied to every token."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.ops import _grouped as grouped
from deltanox.ops.moe import expert_mlp, lay_out, route
from helpers import TOLERANCE, rel

run = jax.jit(expert_mlp, static_argnames="block_size")


def by_hand(x, experts, weights, gate_up, down):
    """One token after the other, in float64."""
    x, weights, gate_up, down = (np.asarray(a, np.float64) for a in (x, weights, gate_up, down))
    inner = down.shape[2]
    out = np.zeros_like(x)
    for t in range(x.shape[0]):
        for e, w in zip(np.asarray(experts)[t], weights[t]):
            both = gate_up[e] @ x[t]
            gate, up = both[:inner], both[inner:]
            out[t] += w * (down[e] @ (gate / (1 + np.exp(-gate)) * up))
    return out


@partial(jax.jit, static_argnums=(1, 2, 3, 4, 5, 6))
def draw(key, T, k, E, D, inner, dtype=jnp.float32):
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (T, D)).astype(dtype)
    routing = route(jax.random.normal(keys[1], (T, E)).astype(dtype), top_k=k)
    gate_up = jax.random.normal(keys[2], (E, 2 * inner, D)).astype(dtype)
    down = jax.random.normal(keys[3], (E, D, inner)).astype(dtype)
    return x, routing.experts, routing.weights, gate_up, down


def test_route_is_softmax_then_top_k_then_normalised(getkey):
    logits = 3 * jax.random.normal(getkey(), (40, 9))
    got = route(logits, top_k=4)
    p = np.exp(np.asarray(logits, np.float64))
    p /= p.sum(-1, keepdims=True)
    order = np.argsort(-p, axis=-1)[:, :4]
    assert np.array_equal(np.asarray(got.experts), order)
    want = np.take_along_axis(p, order, -1)
    assert rel(got.probabilities, p) < 1e-6
    assert rel(got.weights, want / want.sum(-1, keepdims=True)) < 1e-6
    assert rel(route(logits, top_k=4, norm_topk_prob=False).weights, want) < 1e-6


def test_weights_sum_to_one_and_ties_take_the_lower_index(getkey):
    """Row 70: normalised in float32, then cast; equal logits go to the lower expert first."""
    weights = route(10 * jax.random.normal(getkey(), (500, 16)), top_k=5).weights
    assert weights.dtype == jnp.float32
    assert np.max(np.abs(np.asarray(weights).sum(-1) - 1)) < 1e-6
    tied = route(jnp.zeros((3, 8)), top_k=3)
    assert tied.experts.tolist() == [[0, 1, 2]] * 3
    partly = route(jnp.asarray([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0]]), top_k=4)
    assert partly.experts.tolist() == [[1, 3, 2, 4]]
    # bfloat16 logits: the sum is divided out before the rounding, so that each weight is rounded once
    logits = jax.random.normal(getkey(), (50, 16)).astype(jnp.bfloat16)
    got = route(logits, top_k=5)
    exact = route(logits.astype(jnp.float32), top_k=5)
    assert got.weights.dtype == jnp.bfloat16
    assert got.probabilities.dtype == jnp.float32
    assert np.array_equal(
        np.asarray(got.weights, np.float32), np.asarray(exact.weights.astype(jnp.bfloat16), np.float32)
    )


@pytest.mark.parametrize(
    "T, k, E, block_size",
    [(1, 1, 1, None), (1, 3, 8, None), (37, 2, 5, 3), (20, 5, 5, 1), (7, 2, 64, 16)],
)
def test_values(getkey, T, k, E, block_size):
    args = draw(getkey(), T, k, E, 6, 4)
    assert rel(run(*args, block_size=block_size), by_hand(*args)) < 1e-6


@pytest.mark.parametrize("target", [0, 4])
def test_no_token_is_dropped_when_all_go_to_one_expert(getkey, target):
    x, _, _, gate_up, down = draw(getkey(), 200, 1, 5, 6, 4)
    experts, weights = jnp.full((200, 1), target, jnp.int32), jnp.ones((200, 1))
    assert rel(run(x, experts, weights, gate_up, down), by_hand(x, experts, weights, gate_up, down)) < 1e-6


def test_layout_places_every_assignment_once(getkey):
    groups = jax.random.randint(getkey(), (53,), 0, 9, jnp.int32)  # 8 is nobody's
    layout = jax.jit(lay_out, static_argnums=(1, 2))(groups, 8, 4)
    source, slot = np.asarray(layout.source).ravel(), np.asarray(layout.slot)
    for a, e in enumerate(np.asarray(groups)):
        if e == 8:
            assert slot[a] == source.size
            assert a not in source
        else:
            assert source[slot[a]] == a
            assert int(layout.group[slot[a] // 4]) == e
    assert np.sum(source < 53) == np.sum(np.asarray(groups) < 8)
    assert np.all(np.diff(layout.group) >= 0)


def dense(x, experts, weights, gate_up, down):
    inner = down.shape[2]
    both = jnp.einsum("td,ejd->tej", x, gate_up)
    out = jnp.einsum("tei,edi->ted", jax.nn.silu(both[..., :inner]) * both[..., inner:], down)
    return jnp.sum(jnp.take_along_axis(out, experts[..., None], axis=1) * weights[..., None], axis=1)


def test_gradients_and_forward_mode(getkey):
    x, experts, weights, gate_up, down = draw(getkey(), 19, 3, 7, 6, 4)
    probe = jax.random.normal(getkey(), (19, 6))

    def loss(f):
        return lambda x, w, g, d: jnp.sum(probe * f(x, experts, w, g, d))

    args = (x, weights, gate_up, down)
    step = tuple(jax.random.normal(getkey(), a.shape) for a in args)

    @partial(jax.jit, static_argnums=0)
    def derivatives(f):
        first = jax.grad(loss(f), (0, 1, 2, 3))(*args)
        forward = jax.jvp(loss(f), args, step)[1]
        second = jax.grad(lambda *a: jnp.sum(jax.grad(loss(f), 2)(*a) ** 2), (0, 2, 3))(*args)
        return *first, forward, *second

    for a, b in zip(derivatives(expert_mlp), derivatives(dense)):
        assert rel(a, b) < 1e-5


def test_gradients_against_a_loop_over_experts(getkey):
    """Experts without a row get zero, tokens that no expert takes too."""
    x, _, weights, gate_up, down = draw(getkey(), 24, 2, 6, 6, 4)
    experts = jnp.asarray([[4, 1], [1, 4]], jnp.int32)[jnp.arange(24) % 2]
    mask = jnp.arange(24) % 5 != 2

    def loop(x, weights, gate_up, down):
        y = jnp.zeros_like(x)
        for e in range(6):
            gate, up = jnp.split(x @ gate_up[e].T, 2, axis=-1)
            share = jnp.sum(jnp.where((experts == e) & mask[:, None], weights, 0.0), axis=1)
            y = y + share[:, None] * ((jax.nn.silu(gate) * up) @ down[e].T)
        return y

    @partial(jax.jit, static_argnums=0)
    def gradients(f):
        return jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1, 2, 3))(x, weights, gate_up, down)

    got = gradients(lambda x, w, g, d: expert_mlp(x, experts, w, g, d, mask=mask))
    for a, b in zip(got, gradients(loop)):
        assert rel(a, b) < 1e-5
    for matrices in got[2:]:
        assert [bool(m.any()) for m in matrices] == [False, True, False, False, True, False]
    assert not np.asarray(got[0])[~np.asarray(mask)].any()


@pytest.mark.parametrize("shared", [True, False])
def test_batches_with_shared_and_with_own_matrices(getkey, shared):
    """vmap then grad, grad then vmap: gradients of shared matrices sum over the batch, per-example ones don't."""
    rows = [draw(getkey(), 11, 2, 4, 6, 3) for _ in range(3)]
    x, experts, weights, gate_up, down = (jnp.stack(a) for a in zip(*rows))
    axis = None if shared else 0
    if shared:
        gate_up, down = gate_up[0], down[0]
    axes = (0, 0, 0, axis, axis)

    def loss(f):
        return lambda g, d: jnp.sum(jnp.sin(jax.vmap(f, axes)(x, experts, weights, g, d)))

    @partial(jax.jit, static_argnums=0)
    def summed(f):
        return jax.grad(loss(f), (0, 1))(gate_up, down)

    for a, b in zip(summed(expert_mlp), summed(dense)):
        assert a.shape == b.shape
        assert rel(a, b) < 1e-5

    @partial(jax.jit, static_argnums=0)
    def each(f):
        one = jax.grad(lambda g, d, x, e, w: jnp.sum(jnp.sin(f(x, e, w, g, d))), (0, 1))
        return jax.vmap(one, (axis, axis, 0, 0, 0))(gate_up, down, x, experts, weights)

    for a, b in zip(each(expert_mlp), each(dense)):
        assert a.shape[0] == 3
        assert rel(a, b) < 1e-5


def test_mask_leaves_tokens_out(getkey):
    x, experts, weights, gate_up, down = draw(getkey(), 12, 2, 4, 6, 3)
    mask = jnp.arange(12) % 3 != 0
    bad = jnp.where(mask[:, None], x, jnp.nan)
    got = run(bad, experts, jnp.where(mask[:, None], weights, jnp.nan), gate_up, down, mask=mask)
    keep = np.asarray(mask)
    assert np.all(np.asarray(got)[~keep] == 0)
    assert rel(got[keep], by_hand(x, experts, weights, gate_up, down)[keep]) < 1e-6


def test_bfloat16(getkey):
    args = draw(getkey(), 50, 2, 4, 16, 8, "bfloat16")
    got = run(*args)
    assert got.dtype == jnp.bfloat16
    # three products in a row, each rounded once
    assert rel(got, by_hand(*args)) < 2 * TOLERANCE["bfloat16"]["value"]


def test_the_accelerators_products_equal_the_loops(getkey):
    """What a TPU or a GPU runs, here on a CPU: ragged_dot on sorted blocks, with empty blocks among them."""
    group = jnp.asarray([3, 0, 5, 1, 1, 4, 5, 3, 0], jnp.int32)
    x, a = jax.random.normal(getkey(), (9, 4, 6)), jax.random.normal(getkey(), (9, 4, 3))
    matrices = jax.random.normal(getkey(), (5, 3, 6))
    assert rel(grouped._dot_ragged(x, matrices, group, flip=False), grouped.block_dot(x, matrices, group)) < 1e-6
    assert (
        rel(grouped._dot_ragged(a, matrices, group, flip=True), grouped.block_dot(a, matrices, group, flip=True)) < 1e-6
    )
    got, want = grouped._outer_ragged(a, x, group, num_groups=5), grouped.block_outer(a, x, group, num_groups=5)
    assert rel(got, want) < 1e-6
    assert np.all(np.asarray(want)[2] == 0)  # a group without blocks
    group = jnp.sort(group)
    want = grouped.block_dot(x, matrices, group)
    assert rel(grouped._dot_ragged(x, matrices, group, flip=False, ordered=True), want) < 1e-6
    want = grouped.block_outer(a, x, group, num_groups=5)
    assert rel(grouped._outer_ragged(a, x, group, num_groups=5, ordered=True), want) < 1e-6


@pytest.mark.parametrize("top_k", [0, 9])
def test_top_k_out_of_range_is_refused(top_k):
    with pytest.raises(ValueError, match="`top_k` must (be at least 1|lie in 1 ... E = 8)"):
        route(jnp.zeros((2, 8)), top_k=top_k)


def test_swapped_expert_matrices_are_refused(getkey):
    x, experts, weights, gate_up, down = draw(getkey(), 5, 2, 4, 6, 3)
    assert gate_up.shape == (4, 6, 6)
    with pytest.raises(Exception, match=r"gate_up|down"):
        expert_mlp(x, experts, weights, gate_up, jnp.swapaxes(down, 1, 2))
