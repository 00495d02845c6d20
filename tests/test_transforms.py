"""Every op, layer and a model under every order of `jax.vmap` and `jax.grad`: the values of separate calls.

A gradient of something that is not mapped is summed over the mapped axis in grad of vmap and is one of each example in
vmap of grad. A rule that cannot tell the two apart gives one of them wrongly, and finite.
"""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox import CausalConv1d, GatedDeltaNet, Qwen3_5Config, qwen3_5
from deltanox.nn import GatedAttention, GatedRMSNorm, RMSNorm, SparseMoE, SwiGLU
from deltanox.ops import Residuals, causal_conv1d, gated_delta_net, gated_delta_rule
from deltanox.ops._product import dot
from deltanox.ops.attention import causal_attention
from deltanox.ops.cross_entropy import cross_entropy
from deltanox.ops.gated_norm import gated_norm_projection
from deltanox.ops.moe import expert_mlp
from helpers import rel

N, M, T = 3, 2, 9
"""Examples; sets of parameters, in a map of maps; tokens."""
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def rule(implementation):
    """With what a user shares between examples as parameters: q and the initial state."""

    def f(params, x):
        k, v, g, beta = x
        y, state = gated_delta_rule(
            params[0], k, v, -jax.nn.softplus(g), jax.nn.sigmoid(beta), initial_state=params[1], use_qk_l2norm=True,
            implementation=implementation,
        )  # fmt: skip
        return jnp.concatenate([y.ravel(), state.ravel()])

    x = (normal(N, T, 1, 64), normal(N, T, 2, 64), normal(N, T, 2), normal(N, T, 2))
    return f, (normal(T, 1, 64), normal(2, 64, 64)), x


def net(implementation):
    def f(params, x):
        qkv, a, b = x
        y, _, _ = gated_delta_net(qkv, a, b, *params, num_key_heads=1, key_head_size=64, implementation=implementation)
        return y

    params = (0.1 * normal(2), normal(2), normal(256, 4), normal(256))
    return f, params, (normal(N, T, 256), normal(N, T, 2), normal(N, T, 2))


def conv(implementation):
    def f(params, x):
        return causal_conv1d(x, *params[:2], initial_state=params[2], activation="silu", implementation=implementation)[
            0
        ]

    return f, (normal(128, 3), normal(128), normal(2, 128)), normal(N, T, 128)


def norm_projection(implementation):
    def f(params, x):
        return gated_norm_projection(*x, *params, eps=1e-6, gate="silu", implementation=implementation)

    return f, (normal(128), normal(5, 256)), (normal(N, T, 256), normal(N, T, 256))


def attention(block_size):
    def f(k, x):
        return causal_attention(x[0], k, x[1], block_size=block_size)

    return f, normal(T, 1, 8), (normal(N, T, 2, 8), normal(N, T, 1, 8))


def entropy(block_size):
    labels = jnp.asarray(rng.integers(0, 11, T))
    return lambda head, x: cross_entropy(x, head, labels, block_size=block_size), normal(11, 6), normal(N, T, 6)


def experts():
    chosen = jnp.asarray(rng.integers(0, 3, (T, 2)))

    def f(params, x):
        return expert_mlp(x[0], chosen, x[1], *params)

    return f, (normal(3, 8, 6), normal(3, 6, 4)), (normal(N, T, 6), normal(N, T, 2))


def product():
    return lambda weight, x: dot(x, weight), normal(4, 6), normal(N, T, 6)


def layer(made, width, pick=lambda out: out):
    """A layer, on sequences of `width` features."""
    floats, static = eqx.partition(made, eqx.is_inexact_array)
    return lambda floats, x: pick(eqx.combine(floats, static)(x)), floats, normal(N, T, width)


def gated_norm():
    floats, static = eqx.partition(GatedRMSNorm(6), eqx.is_inexact_array)
    return lambda floats, x: eqx.combine(floats, static)(*x), floats, (normal(N, T, 6), normal(N, T, 6))


def mixer(implementation, **options):
    key = jax.random.key(0)
    made = GatedDeltaNet(
        16, num_key_heads=1, num_value_heads=2, key_head_size=64, value_head_size=128, implementation=implementation,
        key=key, **options,
    )  # fmt: skip
    return layer(made, 16, lambda out: out[0])


def model():
    config = Qwen3_5Config(
        vocab_size=19, embed_size=12, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
        key_head_size=8, value_head_size=128, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=16, tied_head=True,
    )  # fmt: skip
    floats, static = eqx.partition(qwen3_5(config, key=jax.random.key(0)), eqx.is_inexact_array)
    tokens = jnp.asarray(rng.integers(0, 19, (N, T)))
    return lambda floats, tokens: eqx.combine(floats, static)(tokens)[0], floats, tokens


KEY = jax.random.key(0)
CASES = {
    "rule, xla": lambda: rule("xla"),
    "rule, chunked": lambda: rule("chunked"),
    "rule, pallas": lambda: rule("pallas"),
    "rule, reference": lambda: rule("reference"),
    "convolution, reference": lambda: conv("reference"),
    "net, auto": lambda: net("auto"),
    "net, pallas": lambda: net("pallas"),
    "convolution, xla": lambda: conv("xla"),
    "convolution, pallas": lambda: conv("pallas"),
    "norm and projection, auto": lambda: norm_projection("auto"),
    "norm and projection, pallas": lambda: norm_projection("pallas"),
    "attention": lambda: attention(0),
    "attention in blocks": lambda: attention(4),
    "cross entropy": lambda: entropy(11),
    "cross entropy in blocks": lambda: entropy(4),
    "experts": experts,
    "product": product,
    "RMSNorm": lambda: layer(RMSNorm(6), 6),
    "GatedRMSNorm": gated_norm,
    "SwiGLU": lambda: layer(SwiGLU(6, 8, key=KEY), 6),
    "SparseMoE": lambda: layer(
        SparseMoE(6, num_experts=4, top_k=2, expert_size=5, shared_size=4, key=KEY), 6, lambda out: out[0]
    ),
    "CausalConv1d": lambda: layer(CausalConv1d(6, 3, use_bias=True, key=KEY), 6, lambda out: out[0]),
    "GatedAttention": lambda: layer(
        GatedAttention(12, num_heads=2, num_kv_heads=1, head_size=8, rotary_size=4, key=KEY), 12, lambda out: out[0]
    ),
    "GatedDeltaNet, auto": lambda: mixer("auto"),
    "GatedDeltaNet, pallas": lambda: mixer("pallas"),
    "GatedDeltaNet, recompute": lambda: mixer("auto", residuals=Residuals(qkv="recompute")),
    "model": model,
}
SLOW = {
    "rule, chunked",
    "rule, reference",
    "rule, pallas",
    "net, auto",
    "net, pallas",
    "convolution, reference",
    "convolution, pallas",
    "GatedDeltaNet, auto",
    "GatedDeltaNet, pallas",
    "GatedDeltaNet, recompute",
}


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def total(trees):
    return jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *trees)


def close(what, got, want):
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = rel(x, y)
        assert error <= 2e-5, f"{what}, gradient of {jax.tree_util.keystr(path)}: relative error {error:.1e}"


def gradients(f, xs):
    """The gradient of a scalar of `f` in parameters and, where they are floating, examples."""
    inexact = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(xs))

    def loss(params, x):
        return jnp.sum(jnp.sin(f(params, x)))

    return loss, (0, 1) if inexact else (0,)


def summed(alone):
    """Gradients of each example as those of the sum over the examples: one sum of the parameters'."""
    return (total([g[0] for g in alone]), *stack([g[1:] for g in alone]))


mapped = functools.partial(jax.vmap, in_axes=(None, 0))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_vmap_of_grad_and_grad_of_vmap(name):
    f, params, xs = CASES[name]()
    loss, argnums = gradients(f, xs)
    one = jax.jit(jax.grad(loss, argnums))
    alone = [one(params, jax.tree.map(lambda x, i=i: x[i], xs)) for i in range(N)]

    @jax.jit
    def transforms(params, xs):
        return (
            mapped(jax.grad(loss, argnums))(params, xs),
            jax.grad(lambda p, xs: jnp.sum(mapped(loss)(p, xs)), argnums)(params, xs),
        )

    each, summed_up = transforms(params, xs)
    close("vmap of grad", each, stack(alone))
    close("grad of vmap", summed_up, summed(alone))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_order_of_vmap_and_grad(name):
    """Two maps with other arguments mapped in each, Jacobians, and maps over cotangents."""
    f, params, xs = CASES[name]()
    many = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    example = [jax.tree.map(lambda x, i=i: x[i], xs) for i in range(N)]
    parameters = [jax.tree.map(lambda p, m=m: p[m], many) for m in range(M)]
    loss, argnums = gradients(f, xs)
    cotangents = normal(N, *jax.eval_shape(f, params, example[0]).shape)
    grad = jax.grad(loss, argnums)
    one = jax.jit(grad)
    alone = [[one(p, x) for x in example] for p in parameters]
    pull = jax.jit(lambda p, x, bar: jax.vjp(f, p, x)[1](bar)[: len(argnums)])
    pulled = stack([pull(params, example[0], bar) for bar in cotangents])
    # jaxlib 0.10.2's CPU code for this one program, JAX's own derivative of the rule, ends in a segmentation fault
    jacobian = name != "rule, chunked" or jax.__version_info__ >= (0, 12)

    @jax.jit
    def transforms(params, many, xs, cotangents):
        grad_of_vmap = jax.grad(lambda p, xs: jnp.sum(mapped(loss)(p, xs)), argnums)
        got = {
            "vmap of vjp": jax.vmap(jax.vjp(f, params, example[0])[1])(cotangents)[: len(argnums)],
            "vmap of grad of vmap": jax.vmap(grad_of_vmap, (0, None))(many, xs),
            "vmap of vmap of grad": jax.vmap(mapped(grad), (0, None))(many, xs),
            "vmap of vmap of grad, examples outside": jax.vmap(jax.vmap(grad, (0, None)), (None, 0))(many, xs),
            "grad of vmap of vmap": jax.grad(lambda p: jnp.sum(jax.vmap(mapped(loss), (0, None))(p, xs)))(many),
        }
        if jacobian:
            got["jacrev of vmap"] = jax.jacrev(lambda p: mapped(loss)(p, xs))(params)
        return got

    each = stack([stack(row) for row in alone])
    want = {
        "vmap of vjp": pulled,
        "vmap of grad of vmap": stack([summed(row) for row in alone]),
        "vmap of vmap of grad": each,
        "vmap of vmap of grad, examples outside": jax.tree.map(lambda x: np.swapaxes(x, 0, 1), each),
        "grad of vmap of vmap": stack([summed(row)[0] for row in alone]),
        "jacrev of vmap": stack([g[0] for g in alone[0]]),
    }
    for what, got in transforms(params, many, xs, cotangents).items():
        close(what, got, want[what])
