"""Ops, layers and a model as functions `f(parameters, example)`, with arguments, for tests that transform them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from deltanox import CausalConv1d, GatedDeltaNet, Qwen3_5Config, qwen3_5
from deltanox.nn import GatedAttention, GatedRMSNorm, RMSNorm, SparseMoE, SwiGLU
from deltanox.ops import Residuals, causal_conv1d, gated_delta_net, gated_delta_rule
from deltanox.ops._product import dot
from deltanox.ops.attention import causal_attention
from deltanox.ops.cross_entropy import cross_entropy
from deltanox.ops.gated_norm import gated_norm_projection
from deltanox.ops.moe import expert_mlp

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


def gradients(f, xs):
    """The gradient of a scalar of `f` in parameters and, where they are floating, examples."""
    inexact = all(jnp.issubdtype(x.dtype, jnp.inexact) for x in jax.tree.leaves(xs))

    def loss(params, x):
        return jnp.sum(jnp.sin(f(params, x)))

    return loss, (0, 1) if inexact else (0,)


mapped = functools.partial(jax.vmap, in_axes=(None, 0))
