"""The convolution as a layer: parameters, state, and that it is the op."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.nn import CausalConv1d, ConvState
from deltanox.ops import causal_conv1d
from helpers import rel


def draw(getkey, *shape):
    random = np.random.default_rng(np.asarray(jax.random.key_data(getkey())))
    return jnp.asarray(random.normal(size=shape).astype(np.float32))


def test_is_the_op(getkey):
    layer = CausalConv1d(5, 4, use_bias=True, key=getkey())
    layer = eqx.tree_at(lambda x: x.bias, layer, draw(getkey, 5))
    x, past = draw(getkey, 13, 5), draw(getkey, 3, 5)
    ids, mask = jnp.asarray([1] * 6 + [2] * 7, jnp.int32), jnp.arange(13) >= 2
    y, state = layer(x, ConvState(past), segment_ids=ids, mask=mask)
    want, last = causal_conv1d(
        x, layer.weight, layer.bias, initial_state=past, segment_ids=ids, mask=mask, activation="silu"
    )
    assert np.array_equal(y, want) and np.array_equal(state.inputs, last)
    for activation, act in (("silu", jax.nn.silu), (None, lambda y: y)):
        plain = CausalConv1d(5, 1, activation=activation, key=getkey())
        assert rel(plain(x)[0], act(x * plain.weight[:, 0][None])) < 1e-6


def test_parameters(getkey):
    """N(0, 0.02), whatever the dtype; the bias is zero, or not there."""
    layer = CausalConv1d(4096, 4, use_bias=True, dtype=jnp.bfloat16, key=getkey())
    weight = np.asarray(layer.weight, np.float64)
    assert layer.weight.shape == (4096, 4) and layer.weight.dtype == layer.bias.dtype == jnp.bfloat16
    assert abs(weight.mean()) < 1e-3 and abs(weight.std() / 0.02 - 1) < 0.03
    assert not np.any(layer.bias)
    plain = CausalConv1d(3, 2, key=getkey())
    assert plain.bias is None and len(jax.tree.leaves(plain)) == 1


@pytest.mark.parametrize("W", [1, 4])
def test_parts_and_steps_are_one_pass(getkey, W):
    """Rows 17, 47: any split, token by token too, from None or from an empty state; states keep dtype and shape."""
    T = 6
    layer = CausalConv1d(5, W, key=getkey())
    x = draw(getkey, T, 5).astype(jnp.bfloat16)
    run = eqx.filter_jit(lambda x, state: layer(x, state))
    whole, end = run(x, None)
    assert np.array_equal(whole, run(x, layer.init_state(dtype=jnp.bfloat16))[0])
    assert end.inputs.shape == (W - 1, 5) and whole.dtype == end.inputs.dtype == jnp.bfloat16
    for sizes in ([1] * 6, [2, 4], [5, 1]):
        state, parts, start = layer.init_state(dtype=x.dtype), [], 0
        for size in sizes:
            y, state = run(x[start : start + size], state)
            parts.append(y)
            start += size
        assert rel(jnp.concatenate(parts), whole) < 1e-6 and np.array_equal(state.inputs, end.inputs)


def test_one_masked_token_leaves_the_state(getkey):
    layer = CausalConv1d(5, 4, key=getkey())
    past = draw(getkey, 3, 5)
    y, state = layer(jnp.full((1, 5), jnp.nan), ConvState(past), mask=jnp.zeros(1, bool))
    assert not np.any(y) and np.array_equal(state.inputs, past)


def test_states_batch_under_vmap(getkey):
    layer = CausalConv1d(5, 4, key=getkey())
    x = draw(getkey, 2, 7, 5)
    y, state = jax.vmap(layer)(x)
    again, _ = jax.vmap(layer)(x, state)
    assert state.inputs.shape == (2, 3, 5)
    assert rel(again[1], layer(x[1], ConvState(state.inputs[1]))[0]) < 1e-6 and rel(y[1], layer(x[1])[0]) < 1e-6


def test_refusals(getkey):
    layer = CausalConv1d(5, 4, key=getkey())
    checker.update("jaxtyping_disable", True)
    try:
        with pytest.raises(
            ValueError,
            match=r"CausalConv1d: `x` must be one sequence \[T, channels\] = \[T, 5\], but it is float32\[2, 7, 5\].*wrap in jax.vmap",
        ):
            layer(jnp.zeros((2, 7, 5)))
        with pytest.raises(ValueError, match=r"must be one sequence \[T, channels\] = \[T, 5\].*x\[None\]"):
            layer(jnp.zeros(5))
        with pytest.raises(
            ValueError, match=r"must be the layer's channels, 5, but x is float32\[5, 7\]: the axes are swapped"
        ):
            layer(jnp.zeros((5, 7)))
        with pytest.raises(ValueError, match=r"`mask` must be \[T\] = \[7\].*wrap in jax.vmap"):
            layer(jnp.zeros((7, 5)), mask=jnp.ones((2, 7), bool))
        with pytest.raises(ValueError, match=r"`initial_state` must be \[\*B, W-1, C\] = \[3, 5\]"):
            layer(jnp.zeros((7, 5)), ConvState(jnp.zeros((4, 5))))
        with pytest.raises(ValueError, match="`conv_size` must be at least 1, but it is 0"):
            CausalConv1d(5, 0, key=getkey())
        with pytest.raises(ValueError, match="`channels` must be at least 1"):
            CausalConv1d(0, 4, key=getkey())
        with pytest.raises(ValueError, match="`activation` must be one of 'silu', None"):
            CausalConv1d(5, 4, activation="relu", key=getkey())
    finally:
        checker.update("jaxtyping_disable", False)


def test_the_checker_names_the_axes(getkey):
    """With the checker on, a batch is stopped at the layer's door, with the shape and the axes."""
    layer = CausalConv1d(5, 4, key=getkey())
    with pytest.raises(Exception, match=r"(?s)f32\[2,7,5\].*T C"):
        layer(jnp.zeros((2, 7, 5)))
