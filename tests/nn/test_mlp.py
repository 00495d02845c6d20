"""SwiGLU and the linear helper."""

import equinox as eqx
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


def test_derivatives_of_the_product(getkey):
    """The weight's term has a transpose of its own: both modes, both orders, batches that share the weight or not."""
    x, w, dx, dw = (jax.random.normal(getkey(), shape) for shape in ((3, 7, 5), (4, 5), (3, 7, 5), (4, 5)))
    skeleton = linear(5, 4, key=getkey())

    def apply(x, w):
        return apply_linear(eqx.tree_at(lambda layer: layer.weight, skeleton, w), x)

    def plain(x, w):
        return jnp.einsum("...i,oi->...o", x, w)

    def mapped(f, axes):
        return jax.vmap(f, axes)

    forms = [
        (lambda f: f, x, w, dx, dw),
        (lambda f: mapped(f, (0, None)), x, w, dx, dw),
        (lambda f: mapped(f, (1, None)), x, w, dx, dw),
        (lambda f: mapped(mapped(f, (0, None)), (1, None)), x, w, dx, dw),
        (lambda f: mapped(f, 0), x, jnp.stack([w, dw, -w]), dx, jnp.stack([dw, w, w])),
        (lambda f: mapped(f, (None, 0)), x[0], jnp.stack([w, dw]), dx[0], jnp.stack([dw, w])),
    ]
    for form, x_, w_, dx_, dw_ in forms:
        got, want = form(apply), form(plain)

        def second(f, x=x_, w=w_):
            return jax.hessian(lambda x, w: jnp.sin(f(x, w)).sum(), argnums=(0, 1))(x, w)

        pairs = [
            (jax.jvp(got, (x_, w_), (dx_, dw_)), jax.jvp(want, (x_, w_), (dx_, dw_))),
            (jax.vjp(got, x_, w_)[1](jnp.cos(got(x_, w_))), jax.vjp(want, x_, w_)[1](jnp.cos(want(x_, w_)))),
            (second(got), second(want)),
        ]
        for a, b in pairs:
            for left, right in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
                assert left.shape == right.shape and rel(left, right) < 1e-5


def test_a_factor_that_is_not_differentiated_costs_nothing(getkey):
    layer, x = linear(5, 4, key=getkey()), jax.random.normal(getkey(), (7, 5))

    def products(f, *arguments):
        return str(
            jax.make_jaxpr(jax.grad(lambda *a: jnp.sin(f(*a)).sum(), argnums=tuple(range(len(arguments)))))(*arguments)
        ).count("dot_general[")

    def of_weight(w):
        return apply_linear(eqx.tree_at(lambda layer: layer.weight, layer, w), x)

    assert products(lambda x: apply_linear(layer, x), x) == 2
    assert products(of_weight, layer.weight) == 1 + 2  # the gradient is written once for CPUs and once for others


def test_gradients_of_each_sequence(getkey):
    """A batch axis on the cotangent that the weight doesn't have: gradients per example."""
    x, y_bar = jax.random.normal(getkey(), (3, 7, 5)), jax.random.normal(getkey(), (3, 7, 4))
    layer = linear(5, 4, key=getkey())
    got = jax.vmap(lambda x, y_bar: jax.vjp(lambda layer: apply_linear(layer, x), layer)[1](y_bar)[0].weight)(x, y_bar)
    assert rel(got, np.einsum("bto,bti->boi", y_bar, x)) < 1e-6


def test_the_gated_product_is_computed_again(getkey):
    """The backward pass keeps the two projections and their product, not what is between."""
    layer = SwiGLU(6, 32, key=getkey())
    kept = jax.vjp(lambda x: layer(x), jnp.ones((7, 6)))[1]
    wide = [leaf for leaf in jax.tree.leaves(kept) if leaf.shape == (7, 32)]
    assert len(wide) == 2


def test_wrong_width_is_refused(getkey):
    with pytest.raises(ValueError, match=r"embed_size = 6, but x is float32\[7, 5\]"):
        SwiGLU(6, 10, key=getkey())(jnp.zeros((7, 5)))
