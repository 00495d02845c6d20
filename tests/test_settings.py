"""JAX's ambient settings neither break an op nor change what it computes, compiled for a TPU too.

`jax_default_matmul_precision` acts where an op's docstring leaves the precision to JAX: on linear layers, attention,
experts and the head. The delta rule has its own `precision`; the convolution and the norms have no products.
"""

import functools
import re

import jax
import numpy as np
import pytest

from deltanox import GatedDeltaNet
from deltanox.tools import aot
from helpers import needs_libtpu
from transformed import CASES, gradients

slow = pytest.mark.slow
PRECISIONS = ("highest", "tensorfloat32", "bfloat16", "BF16_BF16_F32")
TRACING = {
    "jax_numpy_dtype_promotion": "standard",
    "jax_numpy_rank_promotion": "allow",
    "jax_threefry_partitionable": False,
    "jax_debug_nans": True,
    "jax_debug_infs": True,
}
OF_ITS_OWN = ("rule, xla", "rule, pallas", "convolution, xla", "convolution, pallas", "RMSNorm", "GatedRMSNorm")


@pytest.fixture
def setting():
    """A function that sets one of JAX's settings until the test ends."""
    before = {}

    def set_it(name, value):
        before.setdefault(name, getattr(jax.config, name))
        jax.config.update(name, value)

    yield set_it
    for name, value in before.items():
        jax.config.update(name, value)


def arguments(name):
    """Value and gradients of a case, with arguments: one example."""
    f, params, xs = CASES[name]()
    loss, argnums = gradients(f, xs)
    return jax.value_and_grad(loss, argnums), (params, jax.tree.map(lambda x: x[0], xs))


def text(f, args):
    """The traced program, without addresses."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(lambda *args: f(*args))(*args)))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=slow if "pallas" in name or "net" in name.lower() else ()) for name in CASES]
)
def test_traced_program(name, setting):
    """The same under settings that do not concern values; under a precision of products, where there is no own one."""
    f, args = arguments(name)
    want = text(f, args)
    for precision in PRECISIONS[-1:] if name not in (*OF_ITS_OWN, "product") else PRECISIONS:
        setting("jax_default_matmul_precision", precision)
        changed = text(f, args) != want
        if name in OF_ITS_OWN or name == "product":
            assert changed == (name == "product"), precision
    setting("jax_default_matmul_precision", None)
    for option, value in TRACING.items():
        setting(option, value)
    assert text(f, args) == want


def check_values(name, under):
    f, args = arguments(name)
    want = jax.jit(f)(*args)
    got = under(f, args)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-6 * float(np.max(np.abs(b))) + 1e-12)


QUICK = ("convolution, pallas", "norm and projection, auto", "cross entropy in blocks", "experts", "RMSNorm")
LONG = [slow, pytest.mark.exhaustive]


def names(*marks):
    return [pytest.param(name, marks=() if name in QUICK else marks) for name in CASES]


@pytest.mark.parametrize("name", names(slow))
def test_values_with_64_bits(name, setting):
    def under(f, args):
        setting("jax_enable_x64", True)
        return jax.jit(f)(*args)

    check_values(name, under)


@pytest.mark.parametrize("name", names(*LONG))
def test_values_without_jit(name, setting):
    def under(f, args):
        setting("jax_disable_jit", True)
        return f(*args)

    check_values(name, under)


@pytest.mark.parametrize("name", names(*LONG))
def test_values_while_nans_are_looked_for(name, setting):
    def under(f, args):
        setting("jax_debug_nans", True)
        setting("jax_debug_infs", True)
        return f(*args)

    check_values(name, under)


def report(dtype):
    """Of the gradients of a mixer on a TPU."""
    layer = jax.eval_shape(
        lambda key: GatedDeltaNet(
            128, num_key_heads=1, num_value_heads=2, key_head_size=128, value_head_size=128, dtype=dtype, key=key
        ),
        jax.random.key(0),
    )
    return aot.compile(
        jax.grad(lambda layer, x: layer(x)[0].astype("float32").sum()),
        layer, jax.ShapeDtypeStruct((256, 128), dtype), topology="v6e",
    )  # fmt: skip


plain_report = functools.cache(report)


@needs_libtpu
@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("bfloat16", {"jax_enable_x64": True, "jax_default_matmul_precision": "highest"}),
        *(
            pytest.param(dtype, {option: value}, marks=LONG)
            for dtype in ("bfloat16", "float32")
            for option, value in [
                ("jax_enable_x64", True),
                *(("jax_default_matmul_precision", x) for x in ("high", *PRECISIONS)),
                ("jax_debug_nans", True),
                ("jax_disable_jit", True),
            ]
        ),
    ],
)
def test_kernels_compiled_for_a_tpu(dtype, settings, setting):
    """The kernels of the mixer, and the same numbers of instructions as without the settings."""
    want = plain_report(dtype)
    for option, value in settings.items():
        setting(option, value)
    got = report(dtype)
    assert set(got.kernel_calls) == {
        "gdn_forward", "gdn_backward", "conv_forward", "conv_backward", "gated_norm_backward"
    }  # fmt: skip
    assert [(k.name, k.launches, k.issued) for k in got.kernels] == [
        (k.name, k.launches, k.issued) for k in want.kernels
    ]
