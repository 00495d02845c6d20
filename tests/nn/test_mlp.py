"""SwiGLU and the linear helper."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.nn import SwiGLU, apply_linear, linear
from helpers import TOLERANCE, rel


def by_hand(layer, x):
    x = np.asarray(x, np.float64)
    gate, up, down = (np.asarray(p.weight, np.float64) for p in (layer.gate_proj, layer.up_proj, layer.down_proj))
    g = x @ gate.T
    return (g / (1 + np.exp(-g)) * (x @ up.T)) @ down.T


def test_values(getkey):
    layer = SwiGLU(6, 10, key=getkey())
    x = 30 * jax.random.normal(getkey(), (7, 6))
    assert rel(layer(x), by_hand(layer, x)) < 1e-6
    assert rel(layer(x[None, :3])[0], by_hand(layer, x)[:3]) < 1e-6


def test_bfloat16(getkey):
    layer = SwiGLU(32, 48, dtype=jnp.bfloat16, key=getkey())
    x = 30 * jax.random.normal(getkey(), (40, 32)).astype(jnp.float32)
    x = x.astype(jnp.bfloat16)
    got = layer(x)
    assert got.dtype == jnp.bfloat16
    # two products in a row, each rounded once
    assert rel(got, by_hand(layer, x)) < 2 * TOLERANCE["bfloat16"]["value"]


def test_initialisation(getkey):
    layer = linear(200, 300, dtype=jnp.bfloat16, key=getkey())
    weight = np.asarray(layer.weight, np.float64)
    assert layer.bias is None
    assert layer.weight.dtype == jnp.bfloat16
    assert weight.shape == (300, 200)
    assert abs(weight.std() / 0.02 - 1) < 0.02
    assert abs(weight.mean()) < 5e-4


def test_the_product_makes_no_transpose(getkey):
    layer = linear(5, 4, key=getkey())
    jaxpr = str(jax.make_jaxpr(lambda x: apply_linear(layer, x))(jnp.zeros((7, 5))))
    assert "transpose" not in jaxpr
    x = jax.random.normal(getkey(), (3, 7, 5))
    assert rel(apply_linear(layer, x), np.asarray(x) @ np.asarray(layer.weight).T) < 1e-6


def test_wrong_width_is_refused(getkey):
    with pytest.raises(ValueError, match=r"embed_size = 6, but x is float32\[7, 5\]"):
        SwiGLU(6, 10, key=getkey())(jnp.zeros((7, 5)))
