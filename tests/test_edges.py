"""Numbers at the edge, padding under a norm without an epsilon, and buffers of fresh states."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.generate import Sampler, sample
from deltanox.generate._sampling import keep
from deltanox.nn import CausalConv1d, GatedAttention, GatedDeltaNet, GatedRMSNorm, RMSNorm
from deltanox.ops import check_inputs, decay_and_beta, gated_delta_rule, gated_delta_step
from deltanox.ops.attention import causal_attention
from helpers import rel


def draw(T=5, H=2, K=4, V=4, seed=0):
    keys = jax.random.split(jax.random.key(seed), 5)
    q, k = (jax.random.normal(key, (T, 1, K)) for key in keys[:2])
    v = jax.random.normal(keys[2], (T, H, V))
    g = -jax.random.uniform(keys[3], (T, H))
    return q, k, v, g, jax.random.uniform(keys[4], (T, H))


def values(inputs, **options):
    def loss(*inputs):
        out, state = gated_delta_rule(*inputs, use_qk_l2norm=True, **options)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(state)), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, range(5), has_aux=True))(*inputs)
    return out, grads


@pytest.mark.parametrize("implementation", ["xla", "chunked", "pallas"])
def test_padding_of_chunks_is_not_normalised(implementation):
    """Without an epsilon, the zeros that fill the last chunk and that stand for masked tokens stay zeros."""
    inputs = draw(K=128, V=128) if implementation == "pallas" else draw()
    mask = jnp.array([False, True, True, True, True])
    options: dict = dict(l2norm_eps=0.0, mask=mask, chunk_size=64 if implementation == "pallas" else 16)
    expected = values(inputs, implementation="reference", **options)
    found = values(inputs, implementation=implementation, **options)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    assert max(map(rel, jax.tree.leaves(found), jax.tree.leaves(expected))) < 1e-4


@pytest.mark.parametrize("make", [
    lambda key: GatedDeltaNet(8, num_key_heads=1, num_value_heads=2, key_head_size=4, value_head_size=4, eps=0.0, key=key),
    lambda key: GatedAttention(8, num_heads=2, num_kv_heads=1, head_size=4, rotary_size=2, eps=0.0, key=key),
])  # fmt: skip
def test_masked_tokens_under_norms_without_an_epsilon(make):
    layer, mask = make(jax.random.key(0)), jnp.array([False, True, True])
    x = jax.random.normal(jax.random.key(1), (3, 8))
    grads = eqx.filter_jit(eqx.filter_grad(lambda layer: jnp.sum(layer(x, mask=mask)[0][1:])))(layer)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))


def test_zero_vectors_without_an_epsilon():
    zero = jnp.zeros((2, 8))
    for f in (RMSNorm(8, eps=0.0), lambda x: GatedRMSNorm(8, eps=0.0)(x, jnp.ones_like(x))):
        assert jnp.array_equal(f(zero), zero)
        assert np.isfinite(jax.grad(lambda x, f=f: jnp.sum(f(x)))(zero)).all()


@pytest.mark.parametrize("scale", [0.0, 1e-40, 1e-30, 1e30])
@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_scales_of_any_size(implementation, scale):
    """The gradient of q is taken of the ordinary scale, and multiplied: never divided by a scale that is zero."""
    inputs = draw(K=128, V=128) if implementation == "pallas" else draw()

    def q_gradient(scale):
        def loss(q):
            return jnp.sum(gated_delta_rule(
                q, *inputs[1:], scale=scale, use_qk_l2norm=True, implementation=implementation
            )[0])  # fmt: skip

        return jax.jit(jax.value_and_grad(loss))(inputs[0])

    (out, grad), (one, expected) = q_gradient(scale), q_gradient(1.0)
    assert np.isfinite(out) and np.isfinite(grad).all()
    if scale in (0.0, 1e-40):
        assert abs(out) <= 1e-37 and np.abs(grad).max() <= 1e-37
    else:
        assert rel(out / scale, one) < 1e-5 and rel(grad / scale, expected) < 1e-5


def test_scales_that_are_numbers():
    inputs = draw()
    one = tuple(x[0] for x in inputs)
    for scale in (np.float32(0.5), np.float64(0.5), np.int32(1)):
        out, _ = gated_delta_step(*one, scale=scale)
        assert jnp.array_equal(out, gated_delta_step(*one, scale=float(scale))[0])
    q = jnp.ones((3, 1, 4))
    assert jnp.array_equal(causal_attention(q, q, q, scale=np.float32(0.5)), causal_attention(q, q, q, scale=0.5))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e39, "1", True, jnp.ones(())])
def test_scales_without_a_meaning(value, unchecked):
    inputs = draw()
    for call in (
        lambda: gated_delta_rule(*inputs, scale=value),
        lambda: gated_delta_step(*(x[0] for x in inputs), scale=value),
    ):
        with pytest.raises(ValueError, match="`scale` must be a finite number"):
            call()
    if not (isinstance(value, float) and value == 1e39):
        with pytest.raises(ValueError, match="`scale` must be a finite number"):
            causal_attention(*[jnp.ones((3, 1, 4))] * 3, scale=value)


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), -1e-6])
def test_epsilons_without_a_meaning(eps):
    for call in (
        lambda: gated_delta_rule(*draw(), use_qk_l2norm=True, l2norm_eps=eps),
        lambda: gated_delta_step(*(x[0] for x in draw()), use_qk_l2norm=True, l2norm_eps=eps),
        lambda: RMSNorm(4, eps=eps),
        lambda: GatedRMSNorm(4, eps=eps),
    ):
        with pytest.raises(ValueError, match="eps` must be a finite number of at least 0"):
            call()


def test_decays_whose_factors_overflow():
    """exp(A_log) · softplus(a) where one factor leaves float32 and the product does not, against float64."""
    a = jnp.array([[-120.0, -70.0, -5.0, 3.0, -200.0, 0.5]])
    A_log = jnp.array([90.0, 30.0, 85.0, -90.0, 85.0, 1.5])
    da, dA = jax.grad(
        lambda a, A: jnp.sum(decay_and_beta(a, jnp.zeros_like(a), A, jnp.zeros_like(A))[0]), (0, 1)
    )(a, A_log)  # fmt: skip
    g = decay_and_beta(a, jnp.zeros_like(a), A_log, jnp.zeros_like(A_log))[0]
    x, A = np.asarray(a, np.float64), np.asarray(A_log, np.float64)
    exact = -np.exp(A) * np.log1p(np.exp(x))
    np.testing.assert_allclose(g, exact, rtol=3e-5, atol=1e-37)
    np.testing.assert_allclose(dA, exact[0], rtol=3e-5, atol=1e-37)
    np.testing.assert_allclose(da, -np.exp(A) / (1 + np.exp(-x)), rtol=3e-5, atol=1e-37)


@pytest.mark.parametrize("sampler", [
    Sampler(temperature=1e-38), Sampler(temperature=1e-45), Sampler(temperature=1e-30), Sampler(top_p=1e-45),
])  # fmt: skip
def test_sampling_that_is_greedy_in_the_limit(sampler):
    logits = jnp.array([[0.0, 3.0, 100.0, 99.0], [-7.0, 4.0, -1.0, 3.9]])
    assert sample(logits, sampler, key=jax.random.key(0)).tolist() == [2, 1]


def test_logits_that_are_infinite():
    """Minus infinity is never drawn, plus infinity always, as with the greedy sampler."""
    logits = jnp.array([[-jnp.inf, 1.0, -jnp.inf], [0.0, jnp.inf, 5.0]])
    assert sample(logits, Sampler(temperature=0.5), key=jax.random.key(0)).tolist() == [1, 1]
    assert keep(logits[:1], Sampler(top_p=1e-45))[0].tolist() == [-jnp.inf, 1.0, -jnp.inf]


@pytest.mark.parametrize("options", [
    {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": float("nan")}, {"top_k": float("inf")},
    {"top_p": float("nan")}, {"top_p": 0.0},
])  # fmt: skip
def test_samplers_without_a_meaning(options, unchecked):
    with pytest.raises(ValueError, match="must be"):
        Sampler(**options)


def test_infinities_are_found_by_check_inputs():
    q, k, v, g, beta = draw()
    for name, wrong in {"q": (q.at[1].set(jnp.inf), k, v), "v": (q, k, v.at[2].set(-jnp.inf))}.items():
        with pytest.raises(ValueError, match=f"`{name}` must be free of NaN and infinity"):
            check_inputs(*wrong, g, beta)
    check_inputs(q, k, v, g.at[1].set(-jnp.inf), beta)


@pytest.mark.parametrize("make", [
    lambda key: GatedAttention(8, num_heads=2, num_kv_heads=1, head_size=4, rotary_size=2, key=key).init_state(4),
    lambda key: GatedDeltaNet(8, num_key_heads=1, num_value_heads=2, key_head_size=4, value_head_size=4, key=key)
    .init_state(),
    lambda key: CausalConv1d(8, 4, key=key).init_state(),
])  # fmt: skip
def test_a_fresh_state_can_be_donated(make):
    state = make(jax.random.key(0))
    leaves = jax.tree.leaves(state)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    jax.block_until_ready(jax.jit(lambda s: jax.tree.map(lambda x: x + x, s), donate_argnums=0)(state))
