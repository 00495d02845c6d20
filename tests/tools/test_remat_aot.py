"""What policies of names do in programs compiled for a TPU: kernels run once or twice, bytes go where they are sent."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from deltanox import GatedDeltaNet, remat
from deltanox.nn import Stack
from deltanox.tools import aot
from deltanox.tools._aot_command import compile_config
from deltanox.train._config import config_from_dict
from helpers import needs_libtpu

pytestmark = needs_libtpu
D, HEADS = 512, (4, 8)
POLICIES = {
    "remat": remat.policy(gdn="remat"),
    "device": remat.policy(gdn="device"),
    "offload": remat.policy(gdn="offload"),
    "input": remat.policy(gdn_out="offload", gdn_states="device", layer_input="offload"),
}


class Layer(eqx.Module):
    mixer: GatedDeltaNet

    def __init__(self, key):
        sizes = dict(num_key_heads=HEADS[0], num_value_heads=HEADS[1], key_head_size=128, value_head_size=128)
        self.mixer = GatedDeltaNet(D, **sizes, dtype=jnp.bfloat16, key=key)

    def __call__(self, x, state=None):
        return x + self.mixer(x)[0], None, None


def compiled(depth, policy, length=2048):
    """The report of value and gradients of a scanned stack, and the bytes predicted for a layer of it."""
    stack = eqx.filter_eval_shape(lambda key: Stack(Layer, depth, key=key), jax.random.key(0))
    x = jax.ShapeDtypeStruct((1, length, D), jnp.bfloat16)

    def f(stack, x):
        def loss(stack, x):
            y = jax.vmap(lambda x: stack(x, remat=policy)[0])(x)
            return jnp.sum(jnp.square(y.astype(jnp.float32)))

        return eqx.filter_value_and_grad(loss)(stack, x)

    layer = eqx.filter_eval_shape(Layer, jax.random.key(0))
    predicted = remat.bytes_per_layer(policy, lambda x, layer: jax.vmap(lambda x: layer(x)[0])(x), x, layer)
    return aot.compile(f, stack, x, topology="tpu7x"), predicted


@pytest.mark.slow
@pytest.mark.parametrize("name, calls", [("remat", 2), ("device", 1), ("input", 1)])
def test_the_kernel_runs_again_unless_its_record_is_saved(name, calls):
    report, _ = compiled(4, POLICIES[name])
    assert {k: n for k, n in report.kernel_calls.items() if k.startswith("gdn")} == {
        "gdn_forward": calls,
        "gdn_backward": 1,
    }
    assert {k.launches for k in report.kernels if k.name == "gdn_backward"} == {4}


@pytest.mark.slow
def test_offload_inside_the_scan_takes_host_memory():
    report, predicted = compiled(4, POLICIES["offload"])
    assert report.kernel_calls["gdn_forward"] == 1
    assert predicted.host == 2048 * 8 * 128 * 2 + 2048 // 128 * 8 * 128 * 128 * 4
    assert report.host_bytes == 4 * predicted.host


FLAGS = ("jax_remat3", "jax_custom_vjp3")


@pytest.mark.slow
@pytest.mark.skipif(not all(hasattr(jax.config, flag) for flag in FLAGS), reason="this JAX has no such settings")
def test_offload_under_the_newer_implementation_of_checkpoints():
    try:
        for flag in FLAGS:
            jax.config.update(flag, True)
        try:
            policy = remat.policy(gdn="offload")
        except UserWarning as warning:
            pytest.skip(f"{warning}")
        report, predicted = compiled(4, policy)
        assert report.kernel_calls["gdn_forward"] == 1
        assert report.host_bytes == 4 * predicted.host
    finally:
        for flag in FLAGS:
            jax.config.update(flag, False)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["device", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("offload", "input"))]
)
def test_memory_grows_with_the_depth_as_predicted(name):
    # so long that activations are most of the memory, and XLA's copies of the weights little
    (four, predicted), (eight, _) = (compiled(depth, POLICIES[name], length=65536) for depth in (4, 8))
    device, host = ((getattr(eight, x) - getattr(four, x)) / 4 for x in ("temporary_bytes", "host_bytes"))
    print(name, "slope", device, host, "predicted", predicted)
    assert host == predicted.host
    assert device + host == pytest.approx(sum(predicted), rel=0.05)


CONFIG = dict(
    model=dict(
        vocab_size=257, embed_size=128, num_layers=4, full_attention_interval=2, mlp_size=256, num_key_heads=1,
        num_value_heads=1, num_heads=1, num_kv_heads=1, head_size=128, tied_head=True,
    ),
    precision=dict(compute="bfloat16"), data=dict(row_length=4096, batch_size=2), optimiser=dict(warmup_steps=1),
    train=dict(steps=4),
)  # fmt: skip


@functools.cache
def everything_saved():
    """The report of `CONFIG`, which two tests compare with others."""
    return compile_config(config_from_dict(CONFIG))


@pytest.mark.slow
def test_the_table_of_a_config_changes_what_is_compiled():
    tables = [dict(remat={}), dict(remat=dict(policy="kernels")), dict(remat=dict(mlp="offload", gdn="device"))]
    reports = [everything_saved(), *(compile_config(config_from_dict(CONFIG | table)) for table in tables)]
    assert [r.kernel_calls["gdn_forward"] for r in reports] == [1, 2, 1, 1]
    everything, nothing, kernels, mlp = reports
    assert nothing.temporary_bytes < kernels.temporary_bytes < everything.temporary_bytes
    assert nothing.host_bytes == kernels.host_bytes == 0
    assert mlp.host_bytes == 2 * 2 * 2 * (2 * 4096 * 256 * 2)  # two periods of two blocks, gate and up


@pytest.mark.slow
def test_the_record_of_a_config_is_what_is_compiled():
    """With all saved, a state every 16 chunks takes an eighth of the states at every second."""
    assert config_from_dict(CONFIG).residuals.states_every == 2
    dense, sparse = everything_saved(), compile_config(config_from_dict(CONFIG | dict(residuals=dict(states_every=16))))
    states = 2 * 2 * 4096 // 128 * 128 * 128 * 4  # two rows of two layers, one head each
    assert dense.temporary_bytes - sparse.temporary_bytes >= 0.9 * states * 7 / 8


@pytest.mark.slow
def test_offload_inside_the_loops_of_a_training_step():
    """Gradients are accumulated in a loop around the stack's."""
    config = config_from_dict(CONFIG | dict(remat=dict(gdn="offload"), train=dict(steps=4, accumulation=2)))
    assert compile_config(config).host_bytes > 0
