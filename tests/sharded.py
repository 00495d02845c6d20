"""Prints how far gradients inside `jax.shard_map` are from those outside, on four devices of a CPU.

    python sharded.py quick|all

Run by `test_sharding.py`.
"""

import functools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec as P

from deltanox.models import Qwen3_5Config, qwen3_5
from deltanox.nn import GatedDeltaNet
from deltanox.ops import Residuals, gated_delta_net, gated_delta_rule
from deltanox.ops.attention import causal_attention
from deltanox.ops.cross_entropy import cross_entropy

jax.config.update("jax_num_cpu_devices", 4)
rng = np.random.default_rng(0)
DATA, HEADS = P("data"), P("data", None, "heads")
B, T, h, H, K, V = 4, 130, 2, 4, 64, 64
CONFIG = Qwen3_5Config(
    vocab_size=61, embed_size=24, num_layers=4, full_attention_interval=2, num_key_heads=2, num_value_heads=4,
    key_head_size=8, value_head_size=12, num_heads=4, num_kv_heads=2, head_size=16, mlp_size=40, tied_head=True,
)  # fmt: skip
SPARSE = Qwen3_5Config(
    **{**CONFIG.__dict__, "mlp_size": 0, "num_experts": 4, "top_k": 2, "expert_size": 8, "shared_size": 8}
)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def compare(name, f, mesh, specs, outs, arrays, *, inside=None, checks=(True, False)):
    """The largest relative error of a gradient of Σ cos f(arrays), with and without JAX's check of what varies."""

    def gradients(f):
        def loss(floats, rest):
            return sum(jnp.sum(jnp.cos(x)) for x in jax.tree.leaves(f(*eqx.combine(floats, rest))))

        floats, rest = eqx.partition(arrays, eqx.is_inexact_array)
        return jax.tree.leaves(jax.jit(jax.grad(loss))(floats, rest))

    want = gradients(f)
    for check in checks:
        sharded = jax.shard_map(inside or f, mesh=mesh, in_specs=specs, out_specs=outs, check_vma=check)
        errors = [jnp.linalg.norm(x - y) / (jnp.linalg.norm(y) + 1e-30) for x, y in zip(gradients(sharded), want)]
        print(f"{name} check_vma={check} {max(map(float, errors)):.1e}", flush=True)


def rule(implementation, *arrays):
    return gated_delta_rule(
        *arrays[:5], initial_state=arrays[5] if arrays[5:] else None, use_qk_l2norm=True, implementation=implementation
    )


def net(implementation, *arrays):
    return gated_delta_net(*arrays, num_key_heads=h, key_head_size=K, implementation=implementation)


def models(rows):
    for name, config in (("model", CONFIG), ("sparse model", SPARSE)):
        floats, static = eqx.partition(qwen3_5(config, key=jax.random.key(0)), eqx.is_inexact_array)

        def logits(floats, tokens, static=static):
            return jax.vmap(lambda tokens: eqx.combine(floats, static)(tokens)[0])(tokens)

        tokens = jnp.asarray(rng.integers(0, 61, (B, 40)))
        compare(name, logits, rows, (P(), DATA), DATA, (floats, tokens))


def mixers(rows):
    """Heads of 128, of which the norm has a form of its own."""
    for qkv in ("save", "recompute"):
        layer = GatedDeltaNet(
            16, num_key_heads=1, num_value_heads=2, key_head_size=128, value_head_size=128,
            residuals=Residuals(qkv=qkv), key=jax.random.key(0),
        )  # fmt: skip
        floats, static = eqx.partition(layer, eqx.is_inexact_array)

        def mix(floats, x, static=static):
            return jax.vmap(lambda x: eqx.combine(floats, static)(x)[0])(x)

        compare(f"mixer, {qkv}", mix, rows, (P(), DATA), DATA, (floats, normal(B, 40, 16)))


def main():
    kinds = (AxisType.Auto,) * 2
    both = jax.make_mesh((2, 2), ("data", "heads"), axis_types=kinds)
    rows = jax.make_mesh((4,), ("data",), axis_types=kinds[:1])
    g, beta = -jax.nn.softplus(normal(B, T, H)), jax.nn.sigmoid(normal(B, T, H))
    arrays = (normal(B, T, h, K), normal(B, T, h, K), normal(B, T, H, V), g, beta, normal(B, H, K, V))
    specs = (*[HEADS] * 5, P("data", "heads"))
    quick = sys.argv[1:] == ["quick"]
    for implementation in ("auto",) if quick else ("xla", "auto", "chunked", "pallas"):
        # interpreted kernels have loops that JAX cannot check; compiled for a TPU they are checked
        checks = (False,) if implementation == "pallas" else (True, False)
        use, inside = functools.partial(rule, "xla"), functools.partial(rule, implementation)
        outs = (HEADS, P("data", "heads"))
        compare(f"rule {implementation}", use, both, specs, outs, arrays, inside=inside, checks=checks)
        compare(
            f"rule {implementation}, zeros", use, both, specs[:5], outs, arrays[:5], inside=inside, checks=checks[:1]
        )
        merged = (normal(B, T, 2 * h * K + H * V), normal(B, T, H), normal(B, T, H), 0.1 * normal(H), normal(H))
        merged += (normal(2 * h * K + H * V, 4),)
        use, inside = functools.partial(net, "xla"), functools.partial(net, implementation)
        specs_net = (*[DATA] * 3, *[P()] * 3)
        compare(f"net {implementation}", use, rows, specs_net, (DATA,) * 3, merged, inside=inside, checks=checks)
    if quick:
        return
    mixers(rows)
    models(rows)
    qkv = (normal(B, 40, 4, 8), normal(B, 40, 2, 8), normal(B, 40, 2, 8))
    for size in (None, 16):
        attend = functools.partial(causal_attention, block_size=size)
        compare(f"attention {size}", attend, rows, (DATA,) * 3, DATA, qkv)
    hidden = (normal(B, 20, 8), normal(50, 8), jnp.asarray(rng.integers(0, 50, (B, 20))))
    for size in (64, 16):
        entropy = functools.partial(cross_entropy, block_size=size)
        compare(f"cross entropy {size}", entropy, rows, (DATA, P(), DATA), DATA, hidden)


if __name__ == "__main__":
    sys.exit(main())
