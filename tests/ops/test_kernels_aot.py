"""The TPU kernels compiled for chips that are not here: they fit, are called as often as they should be, and cost what
the README says."""

import dataclasses
import importlib.metadata

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from deltanox import GatedDeltaNet
from deltanox.ops import Residuals, causal_conv1d, gated_delta_net
from deltanox.ops.delta_rule.tiling import Problem, choose, vmem_bytes
from deltanox.tools import aot
from helpers import needs_libtpu

pytestmark = needs_libtpu
slow = pytest.mark.slow
CHIPS = ("v5e", "v5p", "v6e", "tpu7x")
HEADS = ((1, 1), (16, 16), (16, 32), (16, 48), (16, 64))


def gradient(topology, h, H, *, T, K=128, V=128, dtype="bfloat16", implementation="pallas", donate=(), **options):
    """The report of value and gradients of the mixer's core without convolution: states in and out, segments given."""
    S = jax.ShapeDtypeStruct
    arrays = (
        S((1, T, 2 * h * K + H * V), dtype), S((1, T, H), dtype), S((1, T, H), dtype), S((H,), "float32"),
        S((H,), "float32"), S((1, H, K, V), "float32"),
    )  # fmt: skip

    def f(ids, cotangents, *arrays):
        def core(*arrays):
            *rest, state = arrays
            out, _, state = gated_delta_net(
                *rest, None, num_key_heads=h, key_head_size=K, initial_state=state, segment_ids=ids,
                implementation=implementation, **options,
            )  # fmt: skip
            return out, state

        values, pull = jax.vjp(core, *arrays)
        return values, pull(cotangents)

    cotangents = S((1, T, H * V), dtype), S((1, H, K, V), "float32")
    return aot.compile(f, S((1, T), "int32"), cotangents, *arrays, topology=topology)


def per_head_chunk(report, name, H, T):
    """Bundles issued for 64 tokens of one value head."""
    return sum(k.issued * k.launches for k in report.kernels if k.name == name) / (H * T / 64)


@pytest.mark.parametrize(
    ("topology", "heads", "T"),
    [
        ("v5e", (16, 64), 1024),
        ("tpu7x", (1, 1), 1000),
        ("v6e", (16, 48), 1024),
        *(
            pytest.param(c, h, t, marks=[slow] if h == HEADS[-1] else [slow, pytest.mark.exhaustive])
            for c in CHIPS
            for h in HEADS
            for t in (8192, 65536)
        ),
        pytest.param("v4", (16, 64), 8192, marks=slow),
    ],
)
def test_kernels_compile_and_fit(topology, heads, T):
    report = gradient(topology, *heads, T=T)
    assert report.kernel_calls == {"gdn_forward": 1, "gdn_backward": 1}


@pytest.mark.parametrize("topology, heads, K, V", [("v6e", (1, 2), 64, 128), ("tpu7x", (3, 3), 64, 64)])
def test_columns_that_begin_amid_the_lanes(topology, heads, K, V):
    assert gradient(topology, *heads, T=300, K=K, V=V).kernel_calls == {"gdn_forward": 1, "gdn_backward": 1}


def test_bundles():
    """Bundles a head-chunk on tpu7x, in loops of constant length; the bars were 206 and 800."""
    if importlib.metadata.version("libtpu") != "0.0.52":
        pytest.skip("the bars were set for libtpu 0.0.52, and another one schedules differently")
    h, H, T = 16, 64, 2048
    report = gradient("tpu7x", h, H, T=T)
    assert not report.no_schedule
    assert per_head_chunk(report, "gdn_forward", H, T) <= 170
    assert per_head_chunk(report, "gdn_backward", H, T) <= 450
    assert not any(k.unknown_trips for k in report.kernels)


@slow
@pytest.mark.parametrize(("packed", "forward", "backward"), [(True, 48, 130), (False, 37.4, 107)])
def test_bundles_of_the_convolution(packed, forward, backward):
    """Of the mixer's channels, W = 4, a state given: what segments cost, and that calls without them pay nothing. The
    bar of both forward kernels together is 254 a head-chunk."""
    if importlib.metadata.version("libtpu") != "0.0.52":
        pytest.skip("the bars were set for libtpu 0.0.52, and another one schedules differently")
    H, T, C = 64, 65536, (2 * 16 + 64) * 128
    S = jax.ShapeDtypeStruct
    x = S((1, T, C), "bfloat16")

    def f(x, weight, state, ids, dy):
        def op(x, weight, state):
            return causal_conv1d(
                x, weight, initial_state=state, segment_ids=ids, activation="silu", implementation="pallas"
            )[0]

        y, pull = jax.vjp(op, x, weight, state)
        return y, pull(2 * dy)

    ids = S((1, T), "int32") if packed else None
    report = aot.compile(f, x, S((C, 4), "bfloat16"), S((1, 3, C), "bfloat16"), ids, x, topology="tpu7x")
    assert per_head_chunk(report, "conv_forward", H, T) <= forward
    assert per_head_chunk(report, "conv_backward", H, T) <= backward
    assert not any(k.unknown_trips for k in report.kernels)
    # the gradient of x lies where the cotangent was
    assert report.temporary_bytes < 0.1 * x.size * 2


@pytest.mark.parametrize(
    ("h", "H", "K", "V", "every", "dtype"),
    [
        pytest.param(16, 64, 128, 128, 4, "bfloat16", marks=slow),
        pytest.param(4, 8, 64, 64, 2, "float32", marks=slow),
        pytest.param(4, 8, 256, 128, 1, "bfloat16", marks=slow),
    ],
)
def test_estimate_of_vmem(h, H, K, V, every, dtype):
    T = 8192
    report = gradient("tpu7x", h, H, T=T, K=K, V=V, dtype=dtype, residuals=Residuals(states_every=2 * every))
    problem = Problem(h, H, K, V, T, every, jnp.dtype(dtype).itemsize, 4, dtype == "bfloat16")
    for kernel in report.kernels:
        kind = kernel.name.removeprefix("gdn_")
        estimate = vmem_bytes(kind, choose(kind, problem), problem)
        assert kernel.vmem_bytes is not None
        assert 0.7 * estimate <= kernel.vmem_bytes <= 1.02 * estimate, kernel.name


def test_a_layer_takes_the_kernels_by_itself():
    """A model that is built with the layers compiles for a TPU from this host, with its kernels and without being told."""
    key = jax.random.key(0)
    make = lambda: GatedDeltaNet(  # noqa: E731
        256, num_key_heads=1, num_value_heads=2, key_head_size=128, value_head_size=128, dtype=jnp.bfloat16, key=key
    )
    layer = eqx.filter_eval_shape(make)

    def loss(layer, x):
        return jax.vmap(lambda x: layer(x)[0])(x).astype(jnp.float32).sum()

    x = jax.ShapeDtypeStruct((2, 512, 256), jnp.bfloat16)
    report = aot.compile(lambda layer, x: eqx.filter_grad(loss)(layer, x), layer, x, topology="v6e")
    assert {"gdn_forward": 1, "gdn_backward": 1}.items() <= report.kernel_calls.items()


@slow
@pytest.mark.parametrize("every", [2, 8])
def test_memory_of_a_gradient(every):
    """Beside arguments and results: the kept states, and nothing of the tokens' size."""
    h, H, T, K = 16, 64, 8192, 128
    report = gradient("tpu7x", h, H, T=T, residuals=Residuals(states_every=every))
    assert report.temporary_bytes <= 1.05 * H * K * K * 4 * T / (64 * every) + 2**24


def test_what_is_kept():
    """A layer's residuals at 64k tokens, in the leanest choice: the arguments and a few states; 2.2 GB at most."""
    h, H, T, K = 16, 64, 65536, 128
    S = jax.ShapeDtypeStruct
    arrays = (
        S((1, T, (2 * h + H) * K), "bfloat16"), S((1, T, H), "bfloat16"), S((1, T, H), "bfloat16"), S((H,), "float32"),
        S((H,), "float32"), S((1, H, K, K), "float32"),
    )  # fmt: skip

    def kept(**choices):
        def core(*arrays):
            *rest, state = arrays
            return gated_delta_net(
                *rest, None, num_key_heads=h, key_head_size=K, initial_state=state, implementation="pallas",
                residuals=Residuals(**choices),
            )  # fmt: skip

        leaves = jax.tree.leaves(jax.eval_shape(lambda *x: jax.vjp(core, *x)[1], *arrays))
        return sum(x.size * x.dtype.itemsize for x in leaves)

    lean = kept(states_every=32, out="recompute")
    assert lean <= 2.2e9
    assert kept(states_every=2, out="recompute") - lean == pytest.approx((512 - 32) * H * K * K * 4, rel=1e-6)


def test_records_are_frozen():
    problem = Problem(1, 1, 128, 128, 128, 1, 2, 4, True)
    with pytest.raises(dataclasses.FrozenInstanceError):
        choose("forward", problem).chunks = 3  # pyright: ignore[reportAttributeAccessIssue]
