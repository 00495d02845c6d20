"""The gated norm's kernels, interpreted, against the formula; and what they save in memory on a TPU."""

import functools
import importlib.util
import os

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox import GatedDeltaNet
from deltanox.nn import GatedRMSNorm
from deltanox.ops.gated_norm import gated_rms_norm, takes
from deltanox.tools import aot
from helpers import rel


def arrays(T, H, V, dtype, lead=()):
    rng = np.random.default_rng(T)
    draw = lambda *shape: jnp.asarray(rng.standard_normal(shape, np.float32))  # noqa: E731
    return draw(*lead, T, H * V).astype(dtype), draw(*lead, T, H * V).astype(dtype), 1 + 0.1 * draw(V)


def by_layer(x, z, weight, gate, size):
    norm = eqx.tree_at(lambda n: n.weight, GatedRMSNorm(size, gate=gate), weight)
    heads = (*x.shape[:-1], -1, size)
    return norm(x.reshape(heads), z.reshape(heads)).reshape(x.shape)


def gradients(f, *arrays):
    def loss(*arrays):
        y = f(*arrays).astype(jnp.float32)
        return jnp.vdot(y, jnp.asarray(np.random.default_rng(1).standard_normal(y.shape, np.float32))), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2), has_aux=True))(*arrays)


@pytest.mark.parametrize(
    ("T", "H", "V", "gate", "dtype"),
    [(256, 3, 128, "silu", "float32"), (300, 2, 256, "sigmoid", "float32"), (1, 16, 128, "silu", "bfloat16")],
)
@pytest.mark.parametrize("implementation", ["pallas", "auto"])
def test_kernels_are_the_layer(T, H, V, gate, dtype, implementation):
    given = arrays(T, H, V, dtype)
    f = functools.partial(gated_rms_norm, eps=1e-6, gate=gate, implementation=implementation)
    (_, y), bars = gradients(f, *given)
    wide = [x.astype(jnp.float32) for x in given]
    (_, want), wants = gradients(functools.partial(by_layer, gate=gate, size=V), *wide)
    bound = 1e-6 if dtype == "float32" else 4e-3
    assert rel(y, want) <= bound
    for got, expected in zip(bars, wants):
        assert rel(got, expected) <= bound


def test_vmap_folds_into_the_batch():
    given = arrays(40, 2, 128, "float32", (3,))
    f = functools.partial(gated_rms_norm, eps=1e-6, gate="silu", implementation="pallas")
    (_, y), bars = gradients(jax.vmap(f, (0, 0, None)), *given)
    (_, want), wants = gradients(functools.partial(by_layer, gate="silu", size=128), *given)
    for got, expected in zip((y, *bars), (want, *wants)):
        assert rel(got, expected) <= 1e-6


def test_a_second_derivative_is_refused():
    x, z, weight = arrays(2, 1, 128, "float32")
    f = lambda x: gated_rms_norm(x, z, weight, eps=1e-6, gate="silu", implementation="auto").sum()  # noqa: E731
    with pytest.raises(NotImplementedError, match="use implementation='chunked'"):
        jax.hessian(f)(x)
    assert not takes(x[:, :64], 64) and takes(x, 128) and not takes(x.astype(jnp.float16), 128)


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None and not os.environ.get("TPU_LIBRARY_PATH"),
    reason="libtpu, which compiles for TPUs, is not installed here (the extra `dev` has it, on Linux and x86-64)",
)
def test_memory_of_a_layer():
    """Value and gradients of the whole mixer: what is kept, and one more array of heads or two."""
    T, D, h, H, size = 4096, 1024, 4, 16, 128
    make = lambda: GatedDeltaNet(  # noqa: E731
        D, num_key_heads=h, num_value_heads=H, key_head_size=size, value_head_size=size, dtype=jnp.bfloat16,
        key=jax.random.key(0),
    )  # fmt: skip
    layer, x = eqx.filter_eval_shape(make), jax.ShapeDtypeStruct((1, T, D), jnp.bfloat16)

    def step(layer, x, bar):
        weights, static = eqx.partition(layer, lambda x: isinstance(x, jax.ShapeDtypeStruct) or eqx.is_array(x))
        y, pull = jax.vjp(lambda w, x: jax.vmap(lambda x: eqx.combine(w, static)(x)[0])(x), weights, x)
        return y, pull(bar)

    report = aot.compile(step, layer, x, x, topology="tpu7x")
    merged, heads, states = (2 * h + H) * size * T * 2, H * size * T * 2, H * size * size * 4 * T // 128
    assert report.kernel_calls["gated_norm_backward"] == 1
    assert report.temporary_bytes <= 2 * merged + 5 * heads + states + 2**24
