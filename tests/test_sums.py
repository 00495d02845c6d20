"""Sums over tokens, heads, rows and experts in bfloat16 models are accumulated in float32.

A sum of ones in bfloat16 stops at 256, so a gradient of 1,024 equal terms shows where its terms are added in 16 bits.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox import CausalConv1d
from deltanox.nn import GatedRMSNorm, RMSNorm, SparseMoE, SwiGLU
from deltanox.ops import gated_delta_rule
from deltanox.ops._embedding import embedding_rows
from deltanox.ops._product import dot
from deltanox.ops.attention import causal_attention
from deltanox.ops.cross_entropy import cross_entropy
from deltanox.ops.gated_norm import gated_norm_projection
from deltanox.ops.gates import decay_and_beta
from helpers import rel

TERMS = 1024
KEY = jax.random.key(0)
rng = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape, np.float32))


def layer(make, pick=lambda out: out):
    floats, static = eqx.partition(make, eqx.is_inexact_array)
    return lambda floats, x: pick(eqx.combine(floats, static)(x)), floats


def equal_tokens(*shape, terms=TERMS):
    return jnp.broadcast_to(normal(*shape), (terms, *shape))


def first(out):
    return out[0]


CASES = {
    "embedding": lambda: (lambda w, _: embedding_rows(w, jnp.zeros(TERMS, jnp.int32)), normal(3, 4), ()),
    "embedding, a batch": lambda: (
        lambda w, x: jax.vmap(lambda x: embedding_rows(w, jnp.zeros(64, jnp.int32)) + x)(x),
        normal(3, 4),
        normal(64, 64, 4),
    ),
    "linear": lambda: (lambda w, x: dot(x, w), normal(3, 4), equal_tokens(4)),
    "RMSNorm": lambda: (*layer(RMSNorm(4)), equal_tokens(4)),
    "gated norm": lambda: (_gated, normal(4), equal_tokens(2, 4)),
    "norm and projection": lambda: (
        lambda p, x: gated_norm_projection(x, x, *p, eps=1e-6, gate="silu", implementation="auto"),
        (normal(128), normal(3, 128)),
        equal_tokens(128),
    ),
    "convolution": lambda: (
        *layer(CausalConv1d(4, 3, use_bias=True, activation="silu", key=KEY), first),
        equal_tokens(4),
    ),
    "gates": lambda: (lambda p, x: jnp.stack(decay_and_beta(x, x, *p)), (normal(4), normal(4)), equal_tokens(4)),
    "feed-forward": lambda: (*layer(SwiGLU(4, 6, key=KEY)), equal_tokens(4)),
    "experts": lambda: (
        *layer(SparseMoE(4, num_experts=2, top_k=2, expert_size=5, shared_size=3, key=KEY), first),
        equal_tokens(4),
    ),
    "attention over heads": lambda: (
        lambda kv, q: causal_attention(q, *kv, offset=1, block_size=0),
        (normal(2, 1, 4), normal(2, 1, 4)),
        equal_tokens(4)[None],
    ),
    "attention in blocks": lambda: (
        lambda kv, q: causal_attention(q, *kv, block_size=16),
        (normal(32, 1, 4), normal(32, 1, 4)),
        jnp.broadcast_to(normal(4), (32, 64, 4)),
    ),
    "delta rule over heads": lambda: (_rule_heads, (normal(4), normal(4)), normal(TERMS, 4)),
    "cross entropy": lambda: (
        lambda w, x: cross_entropy(x, w, jnp.zeros(TERMS, jnp.int32)),
        normal(5, 4),
        equal_tokens(4),
    ),
    "cross entropy in blocks": lambda: (
        lambda w, x: cross_entropy(x, w, jnp.zeros(TERMS, jnp.int32), block_size=2),
        normal(5, 4),
        equal_tokens(4),
    ),
}


def _gated(weight, x):
    norm = eqx.tree_at(lambda n: n.weight, GatedRMSNorm(4), weight)
    return norm(x, x)


def _rule_heads(qk, v):
    """One token whose key and query are read by 1,024 value heads."""
    q, k = (x[None, None] for x in qk)
    v = v[None]
    beta = jnp.ones(v.shape[:2], v.dtype)
    return gated_delta_rule(q, k, v, None, beta, use_qk_l2norm=True)[0]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n == "delta rule over heads" else ()) for n in CASES]
)
def test_equal_terms_add_up_in_bfloat16(name):
    f, params, x = CASES[name]()

    def gradient(dtype):
        cast = lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(dtype), tree)  # noqa: E731

        def loss(params, x):
            # equal cotangents: what they are is not looked at
            return sum(jnp.sum(y.astype(jnp.float32)) for y in jax.tree.leaves(f(params, x)))

        return jax.tree.leaves_with_path(jax.jit(jax.grad(loss))(cast(params), cast(x)))

    for (path, got), (_, want) in zip(gradient(jnp.bfloat16), gradient(jnp.float32), strict=True):
        error = rel(got, want)
        # roundings of each term (equal in all) and of the sum; a sum in 16 bits is off by 0.7
        assert error <= 0.1, f"gradient of {jax.tree_util.keystr(path)}: relative error {error:.2f}"
