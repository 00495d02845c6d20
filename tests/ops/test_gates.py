"""The gates of the delta rule against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.ops import decay_and_beta
from helpers import rel


def draw(getkey, *shapes, dtype=jnp.float32):
    random = np.random.default_rng(np.asarray(jax.random.key_data(getkey())))
    return [jnp.asarray(random.normal(size=s).astype(np.float32)).astype(dtype) for s in shapes]


def by_hand(a, b, A_log, dt_bias):
    a, b, A_log, dt_bias = (np.asarray(x, np.float64) for x in (a, b, A_log, dt_bias))
    return -np.exp(A_log) * np.logaddexp(0, a + dt_bias), 1 / (1 + np.exp(-b))


@pytest.mark.parametrize("lead", [(), (7,), (2, 5)])
def test_values(getkey, lead):
    a, b = draw(getkey, (*lead, 3), (*lead, 3))
    A_log, dt_bias = draw(getkey, (3,), (3,))
    for got, want in zip(decay_and_beta(3 * a, b, A_log, dt_bias), by_hand(3 * a, b, A_log, dt_bias)):
        assert got.dtype == jnp.float32 and got.shape == (*lead, 3) and rel(got, want) < 1e-6


def test_far_ends():
    """Large and small arguments: no overflow, no zero where there is a value, derivatives finite."""
    a = jnp.asarray([[-80.0, -20.0, 0.0, 20.0, 1e4]])
    A_log, dt_bias = jnp.asarray([-4.6, 0.0, 1.0, 2.77, 2.77]), jnp.ones((5,))
    g, beta = decay_and_beta(a, a, A_log, dt_bias)
    want = by_hand(a, jnp.clip(a, -700, 700), A_log, dt_bias)
    assert np.allclose(g, want[0], rtol=2e-6, atol=0) and np.all(g <= 0) and np.all(g < 0)
    assert np.allclose(beta, want[1], rtol=2e-6, atol=1e-43)
    for gradient in jax.grad(lambda *x: sum(jnp.sum(y) for y in decay_and_beta(*x)), argnums=(0, 1, 2, 3))(
        a, a, A_log, dt_bias
    ):
        assert np.all(np.isfinite(gradient))


def test_gradients(getkey):
    """Closed forms: dg/da = −A σ(a + dt), dg/dA_log = g, dβ/db = β (1 − β)."""
    a, b, dg, dbeta = draw(getkey, (2, 5, 3), (2, 5, 3), (2, 5, 3), (2, 5, 3))
    A_log, dt_bias = draw(getkey, (3,), (3,))
    _, pull = jax.vjp(decay_and_beta, a, b, A_log, dt_bias)
    da, db, dA, ddt = pull((dg, dbeta))
    g, beta = by_hand(a, b, A_log, dt_bias)
    want = (
        -np.exp(np.asarray(A_log, np.float64))
        / (1 + np.exp(-np.asarray(a + dt_bias[None, None], np.float64)))
        * np.asarray(dg, np.float64)
    )
    assert rel(da, want) < 1e-6
    assert rel(ddt, want.sum((0, 1))) < 1e-5
    assert rel(dA, (g * np.asarray(dg, np.float64)).sum((0, 1))) < 1e-5
    assert rel(db, beta * (1 - beta) * np.asarray(dbeta, np.float64)) < 1e-6


def test_bfloat16_projections_are_widened(getkey):
    """g and β are float32 functions of the rounded projections; β is rounded under strict_hf_rounding only."""
    a, b = draw(getkey, (64, 3), (64, 3), dtype=jnp.bfloat16)
    A_log, dt_bias = draw(getkey, (3,), (3,))
    g, beta = decay_and_beta(a, b, A_log, dt_bias)
    want = by_hand(a, b, A_log, dt_bias)
    assert g.dtype == beta.dtype == jnp.float32
    assert rel(g, want[0]) < 1e-6 and rel(beta, want[1]) < 1e-6
    strict_g, strict_beta = decay_and_beta(a, b, A_log, dt_bias, strict_hf_rounding=True)
    assert np.array_equal(strict_g, g) and strict_beta.dtype == jnp.float32
    assert np.array_equal(strict_beta, beta.astype(jnp.bfloat16).astype(jnp.float32)) and not np.array_equal(
        strict_beta, beta
    )


def test_row_20_bfloat16_decay_rates_matter(getkey):
    """Row 20: what keeping A_log in float32 prevents: rounding it moves A by 0.3 % on average, and by up to 1.6 %."""
    A_log = jnp.log(jax.random.uniform(getkey(), (4096,), minval=0.01, maxval=16.0))
    a = jnp.zeros((1, 4096))
    exact, _ = decay_and_beta(a, a, A_log, jnp.ones((4096,)))
    rounded, _ = decay_and_beta(a, a, A_log.astype(jnp.bfloat16), jnp.ones((4096,)))
    error = np.abs(np.asarray(rounded / exact) - 1)
    assert 1e-3 < error.mean() < 5e-3 and 5e-3 < error.max() < 1.6e-2


def test_float64(getkey):
    with jax.enable_x64(True):
        a, b, A_log, dt_bias = draw(getkey, (5, 3), (5, 3), (3,), (3,), dtype=jnp.float64)
        for got, want in zip(decay_and_beta(a, b, A_log, dt_bias), by_hand(a, b, A_log, dt_bias)):
            assert got.dtype == jnp.float64 and rel(got, want) < 1e-14


@pytest.mark.parametrize(
    "a, b, A_log, dt_bias, sentence",
    [
        ((5, 3), (5, 2), (3,), (3,), "`a` and `b` must have one shape"),
        ((3, 5), (3, 5), (3,), (3,), r"`A_log` must be \[H\] = \[5\], .* but it is float32\[3\]"),
        ((5, 3), (5, 3), (3,), (1,), r"`dt_bias` must be \[H\] = \[3\]"),
        ((5, 3), (5, 3), (1, 3), (3,), r"`A_log` must have the axes \[H\]"),
    ],
)
def test_refusals(a, b, A_log, dt_bias, sentence):
    checker.update("jaxtyping_disable", True)
    try:
        with pytest.raises(ValueError, match="decay_and_beta: " + sentence):
            decay_and_beta(*(jnp.zeros(s) for s in (a, b, A_log, dt_bias)))
        with pytest.raises(ValueError, match="`a` must hold floating values"):
            decay_and_beta(jnp.zeros((5, 3), jnp.int32), *(jnp.zeros(s) for s in ((5, 3), (3,), (3,))))
    finally:
        checker.update("jaxtyping_disable", False)
