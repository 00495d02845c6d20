"""SparseMoE and its balance loss."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.nn import RouterStats, SparseMoE, load_balance_loss
from helpers import TOLERANCE, rel


def make(key, dtype=jnp.float32, D=8, num_experts=6, top_k=2, scale=0.5, **more):
    layer = SparseMoE(
        D, num_experts=num_experts, top_k=top_k, expert_size=5, shared_size=7, dtype=dtype, key=key, **more
    )
    leaves, tree = jax.tree.flatten(eqx.filter(layer, eqx.is_array))
    keys = jax.random.split(key, len(leaves))
    leaves = [(scale * jax.random.normal(k, x.shape)).astype(x.dtype) for k, x in zip(keys, leaves)]
    return eqx.combine(jax.tree.unflatten(tree, leaves), layer)


run = eqx.filter_jit(lambda layer, x, mask=None: layer(x, mask=mask))


def by_hand(layer, x):
    x = np.asarray(x, np.float64)
    w = lambda a: np.asarray(a, np.float64)  # noqa: E731
    silu = lambda a: a / (1 + np.exp(-a))  # noqa: E731
    logits = x @ w(layer.gate.weight).T
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    shared = layer.shared_expert
    y = silu(x @ w(shared.gate_proj.weight).T) * (x @ w(shared.up_proj.weight).T) @ w(shared.down_proj.weight).T
    y = y / (1 + np.exp(-(x @ w(layer.shared_expert_gate.weight).T)))
    for t in range(x.shape[0]):
        chosen = np.argsort(-p[t], kind="stable")[: layer.top_k]
        for e in chosen:
            weight = p[t, e] / p[t, chosen].sum() if layer.norm_topk_prob else p[t, e]
            gate, up = np.split(w(layer.experts_gate_up)[e] @ x[t], 2)
            y[t] += weight * (w(layer.experts_down)[e] @ (silu(gate) * up))
    return y, p


@pytest.mark.parametrize("normalised", [True, False])
def test_values_and_statistics(getkey, normalised):
    layer, x = make(getkey(), norm_topk_prob=normalised), jax.random.normal(getkey(), (23, 8))
    y, stats = run(layer, x)
    want, p = by_hand(layer, x)
    assert rel(y, want) < 1e-5
    assert rel(stats.probs, p.sum(0)) < 1e-6
    assert float(stats.rows) == 23
    chosen = np.argsort(-p, axis=-1)[:, :2]
    assert np.array_equal(np.asarray(stats.counts), np.bincount(chosen.ravel(), minlength=6))


def test_batch_equals_rows_and_gradients_add_up(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (3, 11, 8))
    y, stats = eqx.filter_jit(jax.vmap(lambda x: layer(x)))(x)
    for b in range(3):
        assert rel(y[b], by_hand(layer, x[b])[0]) < 1e-5
    assert stats.counts.shape == (3, 6)

    @eqx.filter_jit
    def gradients(layer, x):
        whole = eqx.filter_grad(lambda l: jnp.sum(jnp.sin(jax.vmap(lambda x: l(x)[0])(x))))(layer)
        each = jax.vmap(lambda x: eqx.filter_grad(lambda l: jnp.sum(jnp.sin(l(x)[0])))(layer))(x)
        return whole, each

    whole, each = gradients(layer, x)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(each)):
        assert rel(a, np.asarray(b).sum(0)) < 1e-5
        assert np.any(np.asarray(a) != 0)


def test_padding_counts_nowhere(getkey):
    """Row 6: half of the rows are padding with one constant vector; loss, statistics and outputs are those of the real
    rows."""
    layer = make(getkey(), num_experts=4)
    x = jax.random.normal(getkey(), (10, 8))
    padded = jnp.concatenate([x, jnp.full((10, 8), 3.0)])
    mask = jnp.arange(20) < 10
    y, stats = run(layer, x)
    y_padded, stats_padded = run(layer, padded, mask)
    assert abs(float(load_balance_loss(stats)) - float(load_balance_loss(stats_padded))) < 1e-6
    assert float(stats_padded.rows) == 10
    assert rel(stats_padded.counts, stats.counts) == 0
    assert rel(y_padded[:10], y) < 1e-6
    assert np.all(np.asarray(y_padded[10:]) == 0)
    unmasked = run(layer, padded)[1]
    assert abs(float(load_balance_loss(stats)) - float(load_balance_loss(unmasked))) > 1e-3  # the fault would be seen


def test_nan_in_padding_reaches_nothing(getkey):
    layer, x = make(getkey()), jax.random.normal(getkey(), (6, 8))
    bad = jnp.concatenate([jnp.full((2, 8), jnp.nan), x])
    mask = jnp.arange(8) >= 2

    @eqx.filter_jit
    def gradients(layer, x, mask):
        def loss(a):
            y, stats = a[0](a[1], mask=mask)
            return jnp.sum(jnp.sin(y)) + load_balance_loss(stats)

        return eqx.filter_grad(loss)((layer, x))

    got, want = gradients(layer, bad, mask), gradients(layer, x, None)
    assert np.all(np.asarray(got[1][:2]) == 0)
    assert rel(got[1][2:], want[1]) < 1e-5
    for a, b in zip(jax.tree.leaves(got[0]), jax.tree.leaves(want[0])):
        assert rel(a, b) < 1e-5


def test_uniform_logits_give_exactly_top_k():
    """Row 69: logits, not probabilities, are softmaxed: E = 8 equal ones with k = 2 give 2."""
    layer = SparseMoE(4, num_experts=8, top_k=2, expert_size=3, shared_size=3, key=jax.random.key(0))
    layer = eqx.tree_at(lambda l: l.gate.weight, layer, jnp.zeros((8, 4)))
    _, stats = run(layer, jnp.ones((5, 4)))
    assert float(load_balance_loss(stats)) == 2.0
    assert stats.counts.tolist() == [5, 5, 0, 0, 0, 0, 0, 0]  # ties go to the lower index


def test_one_hot_logits_give_the_closed_form():
    """Row 69: logits (c, 0, 0, 0) for every token, k = 1: loss = E · p_0 with p_0 = e^c / (e^c + 3)."""
    layer = SparseMoE(2, num_experts=4, top_k=1, expert_size=3, shared_size=3, key=jax.random.key(0))
    layer = eqx.tree_at(lambda l: l.gate.weight, layer, jnp.asarray([[2.0, 0], [0, 0], [0, 0], [0, 0]]))
    _, stats = run(layer, jnp.asarray([[1.0, 5.0]] * 6))
    assert float(load_balance_loss(stats)) == pytest.approx(4 * np.exp(2) / (np.exp(2) + 3), rel=1e-6)


def test_statistics_add_over_layers_and_batch(getkey):
    layers = [make(getkey()) for _ in range(2)]
    x = jax.random.normal(getkey(), (3, 7, 8))
    parts = [run(layer, row)[1] for layer in layers for row in x]
    total = jax.tree.map(lambda *s: sum(s[1:], s[0]), *parts)
    p = np.concatenate([by_hand(layer, row)[1] for layer in layers for row in x])
    counts = np.bincount(np.argsort(-p, -1)[:, :2].ravel(), minlength=6)
    assert rel(load_balance_loss(total), 6 * np.sum(counts / 42 * p.mean(0))) < 1e-6


def test_the_loss_pulls_towards_balance(getkey):
    """A step against the gradient lowers it, and only the probabilities carry one."""
    layer, x = make(getkey()), jax.random.normal(getkey(), (50, 8))
    loss = eqx.filter_jit(eqx.filter_value_and_grad(lambda layer: load_balance_loss(layer(x)[1])))
    value, gradient = loss(layer)
    step = eqx.tree_at(lambda l: l.gate.weight, layer, layer.gate.weight - 1e-3 * gradient.gate.weight)
    assert float(jnp.sum(gradient.gate.weight**2)) > 0
    assert float(loss(step)[0]) < float(value)


def test_bfloat16(getkey):
    layer = make(getkey(), jnp.bfloat16, scale=0.3)
    x = jax.random.normal(getkey(), (40, 8)).astype(jnp.bfloat16)
    y, stats = run(layer, x)
    assert y.dtype == jnp.bfloat16
    assert stats.counts.dtype == stats.probs.dtype == stats.rows.dtype == jnp.float32
    # the router's logits are rounded to bfloat16, so that a near tie may pick another expert: compare the others
    want, p = by_hand(layer, x)
    third = np.sort(p, -1)[:, -3]
    clear = np.sort(p, -1)[:, -2] > 1.05 * third
    assert clear.sum() > 25
    assert rel(np.asarray(y, np.float64)[clear], want[clear]) < 3 * TOLERANCE["bfloat16"]["value"]


def test_statistics_that_were_not_summed_are_refused():
    stats = RouterStats(jnp.ones((3, 4)), jnp.ones((3, 4)), jnp.ones((3,)))
    with pytest.raises(Exception, match=r"counts|stats"):
        load_balance_loss(stats)


def test_wrong_width_and_top_k_are_refused(getkey):
    with pytest.raises(ValueError, match=r"`x` must have D = 8 features last, but it is float32\[3, 5\]"):
        make(getkey())(jnp.zeros((3, 5)))
    with pytest.raises(ValueError, match="`top_k` must lie in 1"):
        make(getkey(), top_k=7)
