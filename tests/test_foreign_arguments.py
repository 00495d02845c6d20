"""Arguments of a foreign type at every public entry: converted, or refused in a sentence of ours, whether or not the
run-time type checker is on."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.generate import Sampler, generate, prefill, sample, stream
from deltanox.models import Qwen3_5Config, qwen3_5
from deltanox.nn import (
    CausalConv1d,
    GatedAttention,
    GatedDeltaNet,
    GatedRMSNorm,
    RMSNorm,
    RotaryEmbedding,
    SparseMoE,
    SwiGLU,
    add_lora,
    apply_linear,
    apply_rotary,
    linear,
    load_balance_loss,
)
from deltanox.ops import (
    causal_conv1d,
    causal_conv1d_step,
    check_inputs,
    decay_and_beta,
    gated_delta_net,
    gated_delta_net_step,
    gated_delta_rule,
    gated_delta_step,
)
from deltanox.ops.attention import attention_segments, causal_attention
from deltanox.ops.cross_entropy import cross_entropy
from deltanox.ops.moe import expert_mlp, route

pytestmark = pytest.mark.usefixtures("unchecked")
KEY = jax.random.key(0)
CONFIG = Qwen3_5Config(
    vocab_size=257, embed_size=8, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
    key_head_size=4, value_head_size=4, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=8, mtp_head=True,
)  # fmt: skip


def ones(*shape):
    return jnp.ones(shape)


def ids(*shape):
    return jnp.zeros(shape, jnp.int32)


@functools.cache
def layers():
    return eqx.filter_jit(make)(KEY)  # one compilation for all


def make(key):
    return dict(
        net=GatedDeltaNet(8, num_key_heads=1, num_value_heads=2, key_head_size=4, value_head_size=4, key=key),
        attention=GatedAttention(8, num_heads=2, num_kv_heads=1, head_size=4, rotary_size=2, key=key),
        conv=CausalConv1d(8, 4, key=key),
        mlp=SwiGLU(8, 6, key=key),
        moe=SparseMoE(8, num_experts=4, top_k=2, expert_size=5, shared_size=7, key=key),
        linear=linear(8, 3, key=key),
        norm=RMSNorm(8),
        gated=GatedRMSNorm(8),
        rotary=RotaryEmbedding(4),
        model=qwen3_5(CONFIG, key=key),
    )


def of(name, method="__call__"):
    return lambda *args, **kwargs: getattr(layers()[name], method)(*args, **kwargs)


RULE = (ones(3, 1, 4), ones(3, 1, 4), ones(3, 2, 4), ones(3, 2), ones(3, 2))
CORE = (ones(3, 16), ones(3, 2), ones(3, 2), ones(2), ones(2), ones(16, 4))
HEADS = dict(num_key_heads=1, key_head_size=4)
QKV = (ones(3, 2, 4), ones(3, 1, 4), ones(3, 1, 4))
EXPERTS = (ones(3, 8), ids(3, 2), ones(3, 2), ones(4, 10, 8), ones(4, 8, 5))


def one(arrays, count=5):
    """The arguments of one token."""
    return (*(x[0] for x in arrays[:count]), *arrays[count:])


# what is called, its right positional arguments and its right options
ENTRIES = {
    "gated_delta_rule": (gated_delta_rule, RULE, {}),
    "gated_delta_step": (gated_delta_step, one(RULE), {}),
    "check_inputs": (check_inputs, RULE, {}),
    "causal_conv1d": (causal_conv1d, (ones(3, 8), ones(8, 4), ones(8)), {}),
    "causal_conv1d_step": (causal_conv1d_step, (ones(8), ones(8, 4), ones(8)), {"initial_state": ones(3, 8)}),
    "gated_delta_net": (gated_delta_net, CORE, HEADS),
    "gated_delta_net_step": (gated_delta_net_step, one(CORE, 3), HEADS),
    "decay_and_beta": (decay_and_beta, CORE[1:5], {}),
    "causal_attention": (causal_attention, QKV, {}),
    "cross_entropy": (cross_entropy, (ones(3, 8), ones(9, 8), ids(3)), {}),
    "route": (functools.partial(route, top_k=2), (ones(3, 4),), {}),
    "expert_mlp": (expert_mlp, EXPERTS, {}),
    "apply_linear": (lambda x: apply_linear(layers()["linear"], x), (ones(3, 8),), {}),
    "apply_rotary": (apply_rotary, (ones(3, 1, 4), ones(3, 2), ones(3, 2)), {}),
    "GatedDeltaNet": (of("net"), (ones(3, 8),), {}),
    "GatedAttention": (of("attention"), (ones(3, 8),), {}),
    "CausalConv1d": (of("conv"), (ones(3, 8),), {}),
    "SwiGLU": (of("mlp"), (ones(3, 8),), {}),
    "SparseMoE": (of("moe"), (ones(3, 8),), {}),
    "RMSNorm": (of("norm"), (ones(3, 8),), {}),
    "GatedRMSNorm": (of("gated"), (ones(3, 8), ones(3, 8)), {}),
    "RotaryEmbedding": (of("rotary"), (ids(3),), {}),
    "HybridLM": (of("model"), (ids(3),), {}),
    "HybridLM.logits": (of("model", "logits"), (ones(3, 8),), {}),
    "HybridLM.mtp_logits": (of("model", "mtp_logits"), (ones(3, 8), ids(3)), {}),
    "prefill": (lambda tokens: prefill(layers()["model"], tokens, capacity=8), (ids(1, 3),), {}),
    "sample": (lambda logits: sample(logits, Sampler(), key=KEY), (ones(3, 8),), {}),
}
FOREIGN = {
    "list": lambda x: x.tolist(),
    "tuple": lambda x: (x,),
    "None": lambda x: None,
    "number": lambda x: 1.5,
    "text": lambda x: "x",
    "complex": lambda x: x.astype(jnp.complex64),
    "bool": lambda x: x.astype(bool),
    "other": lambda x: x.astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.floating) else jnp.float32),
}
OPTIONAL = {  # where None has a meaning
    ("gated_delta_rule", 3), ("gated_delta_step", 3), ("check_inputs", 3), ("causal_conv1d", 2),
    ("causal_conv1d_step", 2), ("gated_delta_net", 5), ("gated_delta_net_step", 5),
}  # fmt: skip


def refused(call, *words):
    """The call ends in one short sentence of ours, and names what is wrong."""
    with pytest.raises((ValueError, TypeError)) as caught:
        call()
    text = str(caught.value)
    assert "must" in text and "\n" not in text and len(text) < 700, text
    assert all(word in text for word in words), text


@pytest.mark.parametrize("name", ENTRIES)
def test_arrays_of_a_foreign_type(name):
    call, arguments, options = ENTRIES[name]
    for index, x in enumerate(arguments):
        for kind, change in FOREIGN.items():
            if kind == "None" and (name, index) in OPTIONAL:
                continue
            wrong = [*arguments[:index], change(x), *arguments[index + 1 :]]
            refused(lambda wrong=wrong: call(*wrong, **options), name.split(".")[0] if name != "apply_linear" else "x")


TOKENS = ["gated_delta_rule", "check_inputs", "causal_conv1d", "gated_delta_net", "GatedDeltaNet", "GatedAttention"]
TOKENS += ["CausalConv1d", "HybridLM"]


@pytest.mark.parametrize("name", TOKENS)
def test_segment_ids_and_masks_of_a_foreign_type(name):
    call, arguments, options = ENTRIES[name]
    for option, wrong in {
        "segment_ids": ([0, 0, 1], 1, ones(3), "x"),
        "mask": ([True] * 3, True, ones(3), ids(3)),
    }.items():
        for value in wrong:
            refused(lambda o=option, v=value: call(*arguments, **options, **{o: v}), f"`{option}`")


@pytest.mark.parametrize("name", ["GatedDeltaNet", "GatedAttention", "CausalConv1d", "HybridLM"])
def test_states_of_a_foreign_type(name):
    call, arguments, _ = ENTRIES[name]
    for wrong in ((ones(3, 8), ones(2, 4, 4)), [], {}, 0, ones(3, 8)):
        refused(lambda wrong=wrong: call(*arguments, wrong), "`state`", "init_state")


SIZES = {
    "RMSNorm": lambda n: RMSNorm(n),
    "GatedRMSNorm": lambda n: GatedRMSNorm(n),
    "RotaryEmbedding": lambda n: RotaryEmbedding(n),
    "SwiGLU": lambda n: SwiGLU(8, n, key=KEY),
    "linear": lambda n: linear(n, 2, key=KEY),
    "add_lora": lambda n: add_lora(layers()["linear"], n, key=KEY),
    "CausalConv1d": lambda n: CausalConv1d(n, 2, key=KEY),
    "SparseMoE": lambda n: SparseMoE(8, num_experts=4, top_k=2, expert_size=n, shared_size=7, key=KEY),
    "GatedDeltaNet": lambda n: GatedDeltaNet(
        n, num_key_heads=1, num_value_heads=2, key_head_size=4, value_head_size=4, key=KEY
    ),
    "GatedAttention": lambda n: GatedAttention(8, num_heads=2, num_kv_heads=1, head_size=n, rotary_size=2, key=KEY),
    "GatedAttention.init_state": lambda n: layers()["attention"].init_state(n),
    "HybridLM.init_state": lambda n: layers()["model"].init_state(n),
    "KVCache.resize": lambda n: layers()["attention"].init_state(4).resize(n),
    "prefill": lambda n: prefill(layers()["model"], ids(1, 1), capacity=n),
    "stream": lambda n: stream(layers()["model"], [1], max_new_tokens=n),
    "generate": lambda n: generate(layers()["model"], [1], max_new_tokens=1, drafts=n),
    "route": lambda n: route(ones(3, 4), top_k=n),
    "cross_entropy": lambda n: cross_entropy(ones(3, 8), ones(9, 8), ids(3), block_size=n),
    "causal_attention": lambda n: causal_attention(*QKV, block_size=n),
    "gated_delta_rule": lambda n: gated_delta_rule(*RULE, chunk_size=n),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_of_a_foreign_type(name):
    for wrong in (2.0, "32", True, np.float32(2), [2], -1):
        refused(lambda wrong=wrong: SIZES[name](wrong))


@pytest.mark.parametrize("name", ["RMSNorm", "linear", "SwiGLU", "HybridLM.init_state"])
def test_sizes_that_are_numpy_integers(name):
    SIZES[name](np.int64(2))


def test_tokens_of_narrow_dtypes():
    """Ids of 8 bits with a vocabulary of 257, which they cannot count."""
    model, tokens = layers()["model"], np.array([1, 2, 127])
    expected = model.embed(jnp.asarray(tokens, jnp.int32))
    for dtype in (jnp.int8, jnp.uint8, jnp.int16, jnp.uint32):
        assert jnp.array_equal(model.embed(jnp.asarray(tokens, dtype)), expected)
    assert jnp.isnan(model.embed(jnp.asarray([-1], jnp.int8))).all()


def test_other_foreign_arguments():
    refused(lambda: load_balance_loss((ones(4), ones(4), ones())), "load_balance_loss", "RouterStats")
    refused(lambda: attention_segments([0, 1], None), "`segment_ids`")
    refused(lambda: attention_segments(None, [True]), "`mask`")
    refused(lambda: layers()["net"](ones(3, 8), snapshots=2), "`snapshots`")
    refused(lambda: layers()["attention"](ones(3, 8), snapshots=("a",)), "`snapshots`")
    refused(lambda: layers()["attention"](ones(3, 8), positions=[0, 1, 2]), "`positions`")
    refused(lambda: prefill(layers()["model"], ids(1, 1), capacity=4, state=(1, 2)), "`state`")
    refused(lambda: stream(layers()["model"], [1], max_new_tokens=1, state=(1, 2)), "`state`")
    refused(lambda: stream(layers()["model"], [[1], [1, 2]], max_new_tokens=1), "pad_prompts")
    refused(lambda: stream(layers()["model"], [1], max_new_tokens=1, sampler=0.5), "`sampler`")
