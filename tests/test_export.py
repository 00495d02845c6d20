"""Programs of `jax.export` for several platforms, and with symbols for sizes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

from deltanox import GatedDeltaNet
from deltanox.ops import causal_conv1d, gated_delta_rule
from deltanox.ops.attention import causal_attention
from transformed import CASES, gradients

PLATFORMS = ("cpu", "tpu", "cuda")


def example(name):
    f, params, xs = CASES[name]()
    loss, argnums = gradients(f, xs)
    return jax.jit(jax.value_and_grad(loss, argnums)), (params, jax.tree.map(lambda x: x[0], xs))


@pytest.mark.parametrize(
    "name, platforms",
    [
        ("GatedDeltaNet, auto", PLATFORMS),
        ("convolution, pallas", ("cpu", "tpu")),
        *(
            pytest.param(name, PLATFORMS, marks=pytest.mark.slow)
            for name in ("rule, xla", "rule, chunked", "model", "experts", "GatedAttention", "cross entropy in blocks")
        ),
        *(
            pytest.param(name, ("cpu", "tpu"), marks=pytest.mark.slow)
            for name in ("rule, pallas", "GatedDeltaNet, pallas")
        ),
    ],
)
def test_one_program_for_several_platforms(name, platforms):
    f, args = example(name)
    program = export.export(f, platforms=platforms)(*args)
    assert program.platforms == platforms
    kernels = "pallas" in name or name in ("GatedDeltaNet, auto", "model")
    assert ("tpu_custom_call" in program.mlir_module()) == kernels
    for got, want in zip(jax.tree.leaves(program.call(*args)), jax.tree.leaves(f(*args)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-6 * float(jnp.max(jnp.abs(want))))


def test_a_kernel_that_was_asked_for_is_refused_where_one_platform_has_none():
    f, args = example("convolution, pallas")
    with pytest.raises(NotImplementedError, match="is a TPU kernel .* compiled for cuda: use implementation='auto'"):
        export.export(f, platforms=PLATFORMS)(*args)


def layer():
    return GatedDeltaNet(
        16, num_key_heads=1, num_value_heads=2, key_head_size=64, value_head_size=128, key=jax.random.key(0)
    )


def test_a_batch_may_be_a_symbol():
    floats, static = eqx.partition(layer(), eqx.is_inexact_array)
    f = lambda floats, x: jnp.sum(jax.vmap(lambda x: eqx.combine(floats, static)(x)[0])(x) ** 2)  # noqa: E731
    batched = jax.jit(jax.grad(f))
    (batch,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 9, 16), jnp.float32)
    program = export.export(batched, platforms=PLATFORMS)(floats, shape)
    x = jax.random.normal(jax.random.key(1), (3, 9, 16))
    for got, want in zip(jax.tree.leaves(program.call(floats, x)), jax.tree.leaves(batched(floats, x)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * float(jnp.max(jnp.abs(want))))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: gated_delta_rule(x, x, x, None, x[..., 0])[0],
        lambda x: causal_conv1d(x[..., 0, :], jnp.ones((16, 4)))[0],
        lambda x: causal_attention(x, x, x),
        lambda x: layer()(x[:, 0])[0],
    ],
)
def test_a_length_may_not_be_a_symbol(f):
    (length,) = export.symbolic_shape("t")
    with pytest.raises(ValueError, match=r"the axis T of `\w+` must be a number, but it is the symbol t: export"):
        export.export(jax.jit(f))(jax.ShapeDtypeStruct((length, 2, 16), jnp.float32))
