"""Each layer against transformers' module, with copied weights, in float32: values and gradients of the inputs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf
from deltanox.nn import (
    GatedAttention,
    GatedRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    SparseMoE,
    SwiGLU,
    apply_rotary,
    load_balance_loss,
)
from helpers import rel
from hf import torch

pytestmark = hf.MARKS

TOLERANCE = 1e-5  # relative L2, float32 on both sides


@pytest.fixture(scope="module")
def qwen():
    """The three modelling files, imported once."""
    from transformers.models.qwen3_5 import configuration_qwen3_5, modeling_qwen3_5
    from transformers.models.qwen3_5_moe import configuration_qwen3_5_moe, modeling_qwen3_5_moe
    from transformers.models.qwen3_next import configuration_qwen3_next, modeling_qwen3_next

    class Qwen:
        dense, moe, next = modeling_qwen3_5, modeling_qwen3_5_moe, modeling_qwen3_next
        dense_config = configuration_qwen3_5.Qwen3_5TextConfig
        moe_config = configuration_qwen3_5_moe.Qwen3_5MoeTextConfig
        next_config = configuration_qwen3_next.Qwen3NextConfig

    return Qwen


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def leaf(x):
    return torch.tensor(x, requires_grad=True)


def compare(ours, theirs, *inputs, tolerance=TOLERANCE):
    """The same output, and the same gradient of every input for one random cotangent."""
    tensors = [leaf(x) for x in inputs]
    want = theirs(*tensors)
    cotangent = draw(99, *want.shape)
    want.backward(torch.tensor(cotangent))

    @jax.jit
    def both(cotangent, *inputs):
        got, pull = jax.vjp(lambda *x: ours(*x), *inputs)
        return got, pull(cotangent)

    got, gradients = both(cotangent, *inputs)
    assert rel(got, hf.numpy(want)) < tolerance
    for a, b in zip(gradients, tensors):
        assert rel(a, b.grad.numpy()) < tolerance


@pytest.mark.parametrize("which", ["next", "dense", "moe"])
def test_rms_norm(qwen, which):
    module = getattr(qwen, which)
    theirs = {"next": "Qwen3NextRMSNorm", "dense": "Qwen3_5RMSNorm", "moe": "Qwen3_5MoeRMSNorm"}[which]
    theirs = hf.randomise(getattr(module, theirs)(24, eps=1e-3), 0)
    ours = hf.copy_norm(RMSNorm(24, eps=1e-3), theirs)
    compare(ours, theirs, draw(1, 7, 24))


@pytest.mark.parametrize("which", ["next", "dense"])
def test_gated_rms_norm(qwen, which):
    theirs = {"next": "Qwen3NextRMSNormGated", "dense": "Qwen3_5RMSNormGated"}[which]
    theirs = hf.randomise(getattr(getattr(qwen, which), theirs)(11, eps=1e-3), 2)
    ours = hf.copy_norm(GatedRMSNorm(11, eps=1e-3), theirs)
    compare(ours, theirs, draw(3, 5, 3, 11), draw(4, 5, 3, 11))


def text_config(make, **more):
    """A small config; head size 16, a quarter or a half of it rotated."""
    sections = more.pop("sections", [2, 1, 1])
    factor = more.pop("factor", 0.5)
    sizes = dict(
        hidden_size=20,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=16,
        rms_norm_eps=1e-5,
        intermediate_size=24,
    )
    rope = dict(
        rope_type="default",
        rope_theta=1e4,
        partial_rotary_factor=factor,
        mrope_section=sections,
        mrope_interleaved=True,
    )
    config = make(**(sizes | more), rope_parameters=rope)
    config._attn_implementation = "eager"
    return config


@pytest.mark.parametrize("three", [False, True])
def test_rotary(qwen, three):
    config = text_config(qwen.dense_config, head_dim=64, factor=0.5, sections=[6, 5, 5])
    theirs = qwen.dense.Qwen3_5TextRotaryEmbedding(config)
    T = 13
    if three:
        positions = np.stack([np.arange(T) // 4, np.arange(T) * 3 % 17, np.arange(T) ** 2 % 29])
    else:
        positions = np.arange(T) * 5
    shape = (3, 1, T) if three else (1, 1, T)
    cos, sin = theirs(torch.zeros(1), torch.tensor(positions).reshape(shape))
    ours = RotaryEmbedding(32, theta=1e4, sections=(6, 5, 5))
    got_cos, got_sin = ours(jnp.asarray(positions, jnp.int32))
    assert rel(got_cos, hf.numpy(cos[0])) < TOLERANCE
    assert rel(got_sin, hf.numpy(sin[0])) < TOLERANCE
    x = draw(5, T, 3, 64)

    def turn(x):
        return qwen.dense.apply_rotary_pos_emb(x, x, cos, sin, unsqueeze_dim=2)[0][0]

    compare(lambda x: apply_rotary(x[0], got_cos, got_sin), turn, x[None])


@pytest.mark.parametrize("which", ["next", "dense", "moe"])
@pytest.mark.parametrize("three", [False, True])
def test_gated_attention(qwen, which, three):
    if three and which == "next":
        pytest.skip("Qwen3-Next has one position a token")
    T = 13
    config = text_config({"next": qwen.next_config, "dense": qwen.dense_config, "moe": qwen.moe_config}[which])
    name = {"next": "Qwen3Next", "dense": "Qwen3_5", "moe": "Qwen3_5Moe"}[which]
    module = getattr(qwen, which)
    theirs = hf.randomise(getattr(module, f"{name}Attention")(config, layer_idx=3), 6)
    rotary = getattr(module, f"{name}RotaryEmbedding" if which == "next" else f"{name}TextRotaryEmbedding")(config)
    ours = GatedAttention(
        20,
        num_heads=6,
        num_kv_heads=2,
        head_size=16,
        rotary_size=8,
        rope_theta=1e4,
        mrope_sections=None if which == "next" else (2, 1, 1),
        eps=1e-5,
        key=jax.random.key(0),
    )
    ours = hf.copy_attention(ours, theirs)
    one = np.arange(T)
    positions = np.stack([one // 4, 3 * one % 17, one**2 % 29]) if three else one
    shape = (3, 1, T) if three else ((1, T) if which == "next" else (1, 1, T))
    turns = rotary(torch.zeros(1), torch.tensor(positions).reshape(shape))
    hidden = torch.full((T, T), float("-inf")).triu(1)[None, None]

    def attend(x):
        return theirs(x[None], position_embeddings=turns, attention_mask=hidden)[0][0]

    given = jnp.asarray(positions, jnp.int32) if three else None  # counted by default
    compare(lambda x: ours(x, positions=given)[0], attend, draw(7, T, 20))


@pytest.mark.parametrize("which", ["next", "dense", "moe"])
def test_mlp(qwen, which):
    config = text_config({"next": qwen.next_config, "dense": qwen.dense_config, "moe": qwen.moe_config}[which])
    module = getattr(qwen, which)
    theirs = {"next": "Qwen3NextMLP", "dense": "Qwen3_5MLP", "moe": "Qwen3_5MoeMLP"}[which]
    theirs = hf.randomise(getattr(module, theirs)(config, intermediate_size=24), 8)
    ours = hf.copy_mlp(SwiGLU(20, 24, key=jax.random.key(0)), theirs)
    compare(ours, theirs, draw(9, 7, 20))


MOE = dict(num_experts=9, num_experts_per_tok=3, moe_intermediate_size=10, shared_expert_intermediate_size=14)


@pytest.mark.parametrize("which, normalised", [("next", True), ("next", False), ("moe", True)])
def test_sparse_moe(qwen, which, normalised):
    make = {"next": qwen.next_config, "moe": qwen.moe_config}[which]
    config = text_config(make, **MOE, **({"norm_topk_prob": normalised} if which == "next" else {}))
    config._experts_implementation = "eager"
    name = {"next": "Qwen3NextSparseMoeBlock", "moe": "Qwen3_5MoeSparseMoeBlock"}[which]
    theirs = hf.randomise(getattr(getattr(qwen, which), name)(config), 10)
    ours = SparseMoE(
        20, num_experts=9, top_k=3, expert_size=10, shared_size=14, norm_topk_prob=normalised, key=jax.random.key(0)
    )
    ours = hf.copy_moe(ours, theirs)
    compare(lambda x: ours(x)[0], lambda x: theirs(x[None])[0], draw(11, 17, 20))


@pytest.mark.parametrize("padded", [False, True])
def test_load_balance_loss(qwen, padded):
    """Two layers and a batch of two: statistics add up over all of them, padding left out."""
    layers = [
        SparseMoE(20, num_experts=9, top_k=3, expert_size=10, shared_size=14, key=jax.random.key(i)) for i in range(2)
    ]
    x = draw(12, 2, 2, 17, 20)  # layer, batch, T, D
    mask = np.ones((2, 17), bool)
    if padded:
        mask[0, :5] = mask[1, 12:] = False
    logits = tuple(torch.tensor(np.asarray(x[i].reshape(-1, 20) @ layers[i].gate.weight.T)) for i in range(2))
    attention_mask = torch.tensor(mask.astype(np.int64)) if padded else None
    want = qwen.next.load_balancing_loss_func(logits, 9, 3, attention_mask)

    @jax.jit
    def ours(x):
        each = [
            jax.vmap(lambda x, m, layer=layer: layer(x, mask=m)[1])(x[i], jnp.asarray(mask))
            for i, layer in enumerate(layers)
        ]
        return load_balance_loss(jax.tree.map(lambda *s: sum(a.sum(0) for a in s), *each))

    assert rel(ours(jnp.asarray(x)), float(want)) < TOLERANCE
