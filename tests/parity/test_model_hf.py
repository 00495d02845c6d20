"""A whole decoder layer of each kind, and a small Qwen3.5 from tokens to logits, against transformers with copied
weights in float32."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf
from deltanox.generate import decode, generate, prefill
from deltanox.models import HybridPeriod, Qwen3_5Config, qwen3_5
from helpers import rel
from hf import torch

pytestmark = hf.MARKS

TOLERANCE = 1e-5  # relative L2, float32 on both sides
LENGTH = 13

# all sizes differ, dk ≠ dv and T ≠ H
CONFIG = Qwen3_5Config(
    vocab_size=61, embed_size=24, num_layers=4, full_attention_interval=2, num_key_heads=2, num_value_heads=6,
    key_head_size=8, value_head_size=10, num_heads=4, num_kv_heads=2, head_size=16, rotary_fraction=0.5,
    mrope_sections=(2, 1, 1),
    mlp_size=40,
)  # fmt: skip
SPARSE = Qwen3_5Config(
    **{**CONFIG.__dict__, "mlp_size": 0, "num_experts": 5, "top_k": 2, "expert_size": 8, "shared_size": 12}
)


def hf_config(config: Qwen3_5Config):
    """The same sizes by Hugging Face's names."""
    from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
    from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig

    names = dict(
        vocab_size=config.vocab_size, hidden_size=config.embed_size, num_hidden_layers=config.num_layers,
        layer_types=[
            "full_attention" if (i + 1) % config.full_attention_interval == 0 else "linear_attention"
            for i in range(config.num_layers)
        ],
        linear_num_key_heads=config.num_key_heads, linear_num_value_heads=config.num_value_heads,
        linear_key_head_dim=config.key_head_size, linear_value_head_dim=config.value_head_size,
        linear_conv_kernel_dim=config.conv_size, num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads, head_dim=config.head_size, rms_norm_eps=config.eps,
        tie_word_embeddings=config.tied_head,
        rope_parameters={
            "rope_type": "default", "rope_theta": config.rope_theta, "partial_rotary_factor": config.rotary_fraction,
            "mrope_section": list(config.mrope_sections),
        },
    )  # fmt: skip
    if not config.num_experts:
        made = Qwen3_5TextConfig(**names, intermediate_size=config.mlp_size)
    else:
        made = Qwen3_5MoeTextConfig(
            **names, num_experts=config.num_experts, num_experts_per_tok=config.top_k,
            moe_intermediate_size=config.expert_size,
            shared_expert_intermediate_size=config.shared_size,
        )  # fmt: skip
    made._attn_implementation = "eager"
    return made


def hf_model(config: Qwen3_5Config, seed=0):
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5ForCausalLM
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeForCausalLM

    make = Qwen3_5MoeForCausalLM if config.num_experts else Qwen3_5ForCausalLM
    model = hf.randomise(make(hf_config(config)), seed, scale=0.2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.copy_(torch.empty_like(parameter).uniform_(0.05, 4).log())
    return model


def copy_block(block, layer):
    """A HybridBlock from a decoder layer, every array of it used."""
    weights = hf.arrays(layer)
    delta = hasattr(layer, "linear_attn")
    theirs = "linear_attn" if delta else "self_attn"
    rename = {}
    for name, value in list(weights.items()):
        part, _, rest = name.partition(".")
        if rest == "conv1d.weight":
            weights[name] = value[:, 0]
        rest = {"conv1d.weight": "conv.weight", "experts.gate_up_proj": "experts_gate_up",
        "experts.down_proj": "experts_down"}.get(
            rest, rest
        )  # fmt: skip
        part = {
            theirs: "mixer",
            "input_layernorm": "input_norm",
            "post_attention_layernorm": "post_attention_norm",
        }.get(part, part)
        rename[name] = f"{part}.{rest}"
    return hf.copy_names(block, weights, rename)


def copy_model(config: Qwen3_5Config, theirs):
    ours = qwen3_5(config, key=jax.random.key(0))
    interval = config.full_attention_interval
    periods = []
    for i in range(config.num_periods):
        layers = theirs.model.layers[i * interval : (i + 1) * interval]
        periods.append(HybridPeriod(tuple(map(copy_block, ours.layers[i].blocks, layers))))
    stacked = jax.tree.map(lambda *x: jnp.stack(x) if eqx.is_array(x[0]) else x[0], *periods)
    ours = eqx.tree_at(lambda m: m.layers.layers, ours, stacked)
    ours = hf.fill(ours, lambda m: m.embedding, hf.numpy(theirs.model.embed_tokens.weight))
    ours = hf.fill(ours, lambda m: m.norm.weight, hf.numpy(theirs.model.norm.weight))
    return ours if config.tied_head else hf.fill(ours, lambda m: m.head, hf.numpy(theirs.lm_head.weight))


@pytest.fixture(scope="module")
def pair():
    theirs = hf_model(CONFIG)
    return copy_model(CONFIG, theirs), theirs


@pytest.fixture(scope="module")
def sparse_pair():
    theirs = hf_model(SPARSE)
    return copy_model(SPARSE, theirs), theirs


run = eqx.filter_jit(lambda model, tokens, mask=None: jax.vmap(lambda t, m: model(t, mask=m)[0])(tokens, mask))


@pytest.mark.parametrize("index", [0, 1], ids=["delta", "attention"])
@pytest.mark.parametrize("kind", ["pair", "sparse_pair"])
def test_a_decoder_layer(request, kind, index):
    ours, theirs = request.getfixturevalue(kind)
    x = np.random.default_rng(1).normal(size=(LENGTH, CONFIG.embed_size)).astype(np.float32)
    block, layer = ours.layers[0].blocks[index], theirs.model.layers[index]
    tensor = torch.tensor(x[None], requires_grad=True)
    positions = torch.arange(LENGTH)[None]
    causal = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]
    embeddings = theirs.model.rotary_emb(tensor, positions[None].expand(3, 1, -1))
    want = layer(
        tensor, position_embeddings=embeddings, attention_mask=causal if index else None, position_ids=positions
    )
    want = (want[0] if isinstance(want, tuple) else want)[0]
    cotangent = np.random.default_rng(2).normal(size=x.shape).astype(np.float32)
    want.backward(torch.tensor(cotangent))

    @eqx.filter_jit
    def value_and_gradient(block, x, cotangent):
        y, pull = jax.vjp(lambda x: block(x)[0], x)
        return y, pull(cotangent)[0]

    got, gradient = value_and_gradient(block, jnp.asarray(x), jnp.asarray(cotangent))
    assert rel(got, hf.numpy(want)) < TOLERANCE
    assert rel(gradient, hf.numpy(tensor.grad[0])) < TOLERANCE


@pytest.mark.parametrize("kind", ["pair", "sparse_pair"])
def test_logits(request, kind):
    ours, theirs = request.getfixturevalue(kind)
    tokens = np.random.default_rng(3).integers(0, CONFIG.vocab_size, (2, LENGTH))
    with torch.no_grad():
        want = hf.numpy(theirs(torch.tensor(tokens)).logits)
    assert rel(run(ours, jnp.asarray(tokens)), want) < TOLERANCE


@pytest.mark.parametrize("kind", ["pair", "sparse_pair"])
def test_left_padded_logits(request, kind):
    ours, theirs = request.getfixturevalue(kind)
    tokens = np.random.default_rng(4).integers(0, CONFIG.vocab_size, (3, LENGTH))
    mask = np.arange(LENGTH)[None] >= np.array([0, 5, 10])[:, None]
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    with torch.no_grad():
        want = theirs(
            torch.tensor(tokens),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(positions),
        ).logits
    got = run(ours, jnp.asarray(tokens), jnp.asarray(mask))
    assert rel(np.asarray(got)[mask], hf.numpy(want)[mask]) < TOLERANCE


def test_tied_logits():
    config = Qwen3_5Config(**{**CONFIG.__dict__, "tied_head": True})
    theirs = hf_model(config)
    ours = copy_model(config, theirs)
    tokens = np.random.default_rng(5).integers(0, config.vocab_size, (1, LENGTH))
    with torch.no_grad():
        want = hf.numpy(theirs(torch.tensor(tokens)).logits)
    assert rel(run(ours, jnp.asarray(tokens)), want) < TOLERANCE


def test_decoding(pair):
    """Prefill of a left-padded batch and eight cached steps, logits by logits; then the same greedy text."""
    ours, theirs = pair
    tokens = np.random.default_rng(6).integers(0, CONFIG.vocab_size, (2, 8))
    mask = np.array([[True] * 8, [False] * 3 + [True] * 5])
    attention, cache = torch.tensor(mask, dtype=torch.long), None
    logits, state = prefill(ours, jnp.asarray(tokens), jnp.asarray(mask), capacity=64)
    new = torch.tensor(tokens)
    text = []
    for _ in range(8):
        positions = (attention.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        with torch.no_grad():
            out = theirs(new, attention_mask=attention, position_ids=positions, past_key_values=cache, use_cache=True)
        cache, want = out.past_key_values, out.logits[:, -1]
        assert rel(logits, hf.numpy(want)) < TOLERANCE
        new = want.argmax(-1, keepdim=True)
        text.append(new[:, 0].numpy())
        attention = torch.cat([attention, torch.ones_like(new)], 1)
        logits, state = decode(ours, jnp.asarray(new[:, 0].numpy()), state)
    np.testing.assert_array_equal(generate(ours, tokens, mask=mask, max_new_tokens=8), np.stack(text, -1))
