"""Policies made of names: equal gradients, what is refused and in which words, and bytes that are known beforehand."""

import itertools
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from deltanox import GatedAttention, GatedDeltaNet, HybridBlock, Qwen3_5Config, SparseMoE, SwiGLU, qwen3_5, remat
from deltanox.nn import Stack
from deltanox.ops import Residuals
from deltanox.ops.cross_entropy import cross_entropy
from helpers import rel

D, H, K, T, B, EVERY = 16, 2, 8, 160, 2, 128
POLICIES = (
    remat.nothing,
    remat.everything,
    remat.kernels,
    remat.minimal_offloaded,
    remat.policy(gdn="device", mlp="offload"),
    remat.policy(gdn_out="offload", gdn_states="device", layer_input="offload"),
)


def cases(fast, *more):
    """All policies; all but number `fast` and `more` marked slow."""
    marks = [[] if i == fast else [pytest.mark.slow] for i in range(len(POLICIES))]
    return [*(pytest.param(policy, marks=mark) for policy, mark in zip(POLICIES, marks)), *more]


def mixer(key, implementation="xla", **options):
    return GatedDeltaNet(
        D, num_key_heads=1, num_value_heads=H, key_head_size=K, value_head_size=K, implementation=implementation,
        key=key, **options,
    )  # fmt: skip


def block(key, mixer=mixer):
    a, b = jax.random.split(key)
    return HybridBlock(mixer(a), SwiGLU(D, 24, key=b), embed_size=D, dtype=jnp.float32)


def attention(key):
    return GatedAttention(D, num_heads=2, num_kv_heads=1, head_size=8, rotary_size=4, key=key)


def moe(key):
    return SparseMoE(D, num_experts=4, top_k=2, expert_size=8, shared_size=8, key=key)


def tokens(getkey):
    return jax.random.normal(getkey(), (B, T, D))


def gradients(run, module, *args):
    """Value and gradients of a weighted sum of `run(module, *args)`."""

    def loss(inexact, *args):
        y = run(inexact, *args)
        weights = 1 + 0.5 * jnp.cos(jnp.arange(y.size, dtype=y.dtype))
        return jnp.mean(jnp.square(y) * weights.reshape(y.shape))

    return eqx.filter_jit(eqx.filter_value_and_grad(loss))(module, *args)


def assert_equal(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert rel(a, b) <= 1e-6


# Gradients --------------------


@pytest.mark.parametrize("policy", cases(4), ids=str)
def test_gradients_of_a_block_do_not_depend_on_the_policy(getkey, policy):
    layer, x = block(getkey()), tokens(getkey)
    leaves, static = eqx.partition(layer, eqx.is_array)

    def run(leaves, x):
        return jax.vmap(lambda x: eqx.combine(leaves, static)(x)[0])(x)

    want = gradients(run, leaves, x)
    assert_equal(gradients(jax.checkpoint(run, policy=policy), leaves, x), want)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_gradients_under_equinox_do_not_depend_on_the_policy(getkey, policy):
    layer, x = block(getkey()), tokens(getkey)

    def run(layer, x):
        return jax.vmap(lambda x: layer(x)[0])(x)

    assert_equal(gradients(eqx.filter_checkpoint(run, policy=policy), layer, x), gradients(run, layer, x))


@pytest.mark.parametrize("policy", cases(3), ids=str)
def test_gradients_of_a_stack_do_not_depend_on_the_policy(getkey, policy):
    stack, x = Stack(block, 3, key=getkey()), tokens(getkey)

    def run(policy):
        return gradients(lambda stack, x: jax.vmap(lambda x: stack(x, remat=policy)[0])(x), stack, x)

    assert_equal(run(policy), run(False))


CONFIG = Qwen3_5Config(
    vocab_size=32, embed_size=D, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
    key_head_size=8, value_head_size=8, num_heads=2, num_kv_heads=1, head_size=8, num_experts=4, top_k=2, expert_size=8,
    shared_size=8, tied_head=True,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("policy", cases(None, remat.policy(moe="device", logits="offload", mlp="device")), ids=str)
def test_gradients_of_a_model_do_not_depend_on_the_policy(getkey, policy):
    model = qwen3_5(CONFIG, implementation="xla", key=getkey())
    ids = jax.random.randint(getkey(), (B, T), 0, 32)

    def run(policy):
        def losses(model, ids):
            hidden = jax.vmap(lambda ids: model.hidden(ids, remat=policy)[0])(ids)
            return cross_entropy(hidden, model.head_weight, ids, remat=policy or None)

        return gradients(losses, model, ids)

    assert_equal(run(policy), run(False))


# Refusals: at construction --------------------


@pytest.mark.parametrize(
    "call, sentence",
    [
        (dict(gdn_ot="device"), "no residual and no group `gdn_ot`; did you mean `gdn_out`?"),
        (dict(attenton="offload"), "no residual and no group `attenton`; did you mean `attention`?"),
        (dict(zzz="device"), "no residual and no group `zzz`; known are gdn, gdn_conv, .*layer_input"),
        (dict(gdn="host"), "`gdn` must be 'remat' .*, 'device' or 'offload' .*, but it is 'host'"),
        (dict(mlp=True), "`mlp` must be 'remat' .* but it is True"),
        (dict(gdn_states="device"), "`gdn_states` is to be saved .'device'. without `gdn_out`: the kernel .* run again.*gdn_out='device'"),
        (dict(gdn_t_inv="offload"), "`gdn_t_inv` is to be saved .'offload'. without `gdn_out` and `gdn_states`"),
        (dict(gdn="device", gdn_out="remat"), "`gdn_states` is to be saved .'device'. without `gdn_out`"),
        (dict(attention_lse="device"), "`attention_lse` is to be saved .'device'. without `attention_out`"),
    ],
)  # fmt: skip
def test_construction_refuses(call, sentence):
    with pytest.raises(ValueError, match=f"^remat: (there is )?{sentence}"):
        remat.policy(**call)


def test_construction_refuses_ready_policies_that_are_none():
    with pytest.raises(
        ValueError, match="ready policies are 'nothing', 'everything', 'kernels', 'minimal_offloaded', but it is 'some'"
    ):
        remat.policy("some")
    with pytest.raises(ValueError, match="'everything' saves all arrays, named or not, and leaves no choice of mlp"):
        remat.policy("everything", mlp="remat")


def test_single_names_go_before_their_group_and_bases_below():
    policy = remat.policy("kernels", gdn_t_inv="remat", mlp="offload", gdn="offload", attention_lse="remat")
    assert policy.names("offload") == ("gdn_out", "gdn_states", "mlp_gate", "mlp_up")
    assert policy.names("device") == ("attention_out",)
    assert policy == remat.policy("kernels", **dict(policy.given)) and hash(policy) == hash(
        remat.policy("kernels", **dict(policy.given))
    )
    assert policy.table() == {"policy": "kernels", **dict(policy.given)}
    assert remat.nothing.names("device", "offload") == ()
    assert set(remat.GROUPS) == {"gdn", "gdn_conv", "gdn_states", "attention", "mlp", "moe", "layer_input", "logits"}


# Refusals: when a function is known --------------------


@pytest.mark.parametrize(
    "policy, layer, sentence",
    [
        (remat.policy(gdn="device"), lambda key: block(key, lambda key: mixer(key, "chunked")), "gdn = 'device' would save nothing: `gdn_out` and `gdn_states` are never made here .only by the engines 'xla' and 'pallas'.*set gdn='remat'.*here: .*mlp_gate"),
        (remat.policy(gdn_t_inv="device", gdn_out="device", gdn_states="offload"), block, "gdn_t_inv = 'device' would save nothing: `gdn_t_inv` is never made here .only by layers with Residuals"),
        (remat.policy(gdn_qkv="device"), lambda key: block(key, lambda key: mixer(key, residuals=Residuals(qkv="recompute"))), "gdn_qkv = 'device' would save nothing: `gdn_qkv` is never made here .only by layers with Residuals.qkv='save'.*gdn_conv_out, gdn_gates, gdn_z"),
        (remat.policy(moe="offload"), block, "moe = 'offload' would save nothing: `moe_logits` and `moe_hidden` and `moe_out` are never made"),
        (remat.policy(attention="device"), block, "attention = 'device' would save nothing: `attention_query`"),
        (remat.kernels, lambda key: Bare(jnp.ones(())), "'kernels' would save nothing: named arrays here: layer_input"),
    ],
)  # fmt: skip
def test_a_stack_refuses_what_its_layers_never_make(getkey, policy, layer, sentence):
    stack = Stack(layer, 2, key=getkey())
    with pytest.raises(ValueError, match=f"^remat: {sentence}"):
        jax.eval_shape(lambda x: stack(x, remat=policy)[0], jnp.ones((T, D)))
    assert jax.eval_shape(lambda x: stack(x, remat=remat.nothing)[0], jnp.ones((T, D))).shape == (T, D)


class Bare(eqx.Module):
    weight: jax.Array

    def __call__(self, x, state=None):
        return x * self.weight, None, None


def test_check_refuses_for_any_function(getkey):
    layer = mixer(getkey(), residuals=Residuals(t_inv="save"))
    x = jax.ShapeDtypeStruct((T, D), jnp.float32)
    remat.check(remat.policy(gdn="device", gdn_t_inv="device"), lambda x: layer(x)[0], x)
    with pytest.raises(
        ValueError, match="mlp = 'device' would save nothing: `mlp_gate` and `mlp_up` are never made here"
    ):
        remat.check(remat.policy(mlp="device"), lambda x: layer(x)[0], x)
    with pytest.raises(
        ValueError, match="logits = 'device' would save nothing: `logits` is never made here .only by a voc"
    ):
        remat.check(remat.policy(logits="device"), lambda x: layer(x)[0], x)


def test_check_refuses_offload_without_host_memory():
    class Memory:
        kind = "device"

    class Device:
        def addressable_memories(self):
            return [Memory()]

        def __repr__(self):
            return "Toy(0)"

    def f(x):
        return checkpoint_name(jnp.sin(x), "mlp_gate") ** 2

    with pytest.raises(
        ValueError,
        match=r"'offload' needs a device .* \(pinned_host\), but Toy\(0\) has device: use 'device' or 'remat' for mlp_gate",
    ):
        remat.check(remat.policy(mlp_gate="offload"), f, jnp.ones(3), devices=[Device()])
    remat.check(remat.policy(mlp_gate="device"), f, jnp.ones(3), devices=[Device()])
    remat.check(remat.policy(mlp_gate="offload"), f, jnp.ones(3))


def test_logits_in_blocks_cannot_be_saved(getkey):
    hidden, head, labels = jax.random.normal(getkey(), (5, D)), jax.random.normal(getkey(), (32, D)), jnp.arange(5)
    with pytest.raises(
        ValueError,
        match="logits = 'offload' would save nothing: the vocabulary of 32 entries is taken in blocks of 8.*block_size=32",
    ):
        cross_entropy(hidden, head, labels, block_size=8, remat=remat.policy(logits="offload"))
    assert cross_entropy(hidden, head, labels, block_size=8, remat=remat.nothing).shape == (5,)


# Bytes, before anything runs --------------------

SIZES = {"B": B, "T": T, "H": H, "K": K, "V": K, "C": 2 * K + H * K, "D": D, "F": 24, "s": EVERY, "c": 64, "n": 2, "m": 1, "hd": 8, "E": 4}  # fmt: skip


@pytest.mark.parametrize(
    "group, names",
    [
        ("gdn", 3),
        ("gdn_conv", 4),
        ("gdn_out", 1),
        ("mlp", 2),
        ("attention", 5),
        ("attention_key", 1),
        ("moe_logits", 1),
    ],
)
def test_formulas_of_the_registry_are_what_jax_saves(getkey, group, names):
    x, names = jax.ShapeDtypeStruct((B, 384, D), jnp.float32), remat.GROUPS.get(group, (group,))[:names]
    make = {
        "gdn": lambda key: mixer(key, residuals=Residuals(t_inv="save")),
        "mlp": block,
        "attention": attention,
        "moe": moe,
    }
    layer = make[group.split("_")[0]](getkey())

    def run(x):
        y = jax.vmap(layer)(x)
        return y[0] if isinstance(y, tuple) else y

    assert names == remat.GROUPS.get(group, (group,))
    want = sum(remat.NAMES[name].bytes(4, **SIZES | {"T": 384}) for name in names)
    assert remat.bytes_per_layer(remat.policy(**{group: "offload"}), run, x).host == want


def test_bytes_by_place(getkey):
    layer, x = block(getkey()), jax.ShapeDtypeStruct((B, T, D), jnp.float32)

    def run(x):
        return jax.vmap(lambda x: layer(x)[0])(x)

    def size(*names):
        return sum(remat.NAMES[name].bytes(4, **SIZES) for name in names)

    carry = size("layer_input")
    assert remat.bytes_per_layer(remat.nothing, run, x) == (carry, 0)
    assert remat.bytes_per_layer(remat.policy(layer_input="device"), run, x) == (carry, 0)
    assert remat.bytes_per_layer(remat.policy(layer_input="offload"), run, x) == (0, carry)
    both = remat.policy(gdn="device", mlp="offload")
    assert remat.bytes_per_layer(both, run, x) == (carry + size("gdn_out", "gdn_states"), size("mlp_gate", "mlp_up"))
    assert remat.bytes_per_layer(remat.everything, run, x).device > 2 * sum(remat.bytes_per_layer(both, run, x))
    with pytest.raises(ValueError, match="moe = 'device' would save nothing"):
        remat.bytes_per_layer(remat.policy(moe="device"), run, x)


def test_the_table_has_a_line_for_every_name():
    lines = remat.table().splitlines()
    assert [line.split()[1] for line in lines[1:]] == list(remat.NAMES)
    assert lines[2].split() == [
        "gdn",
        "gdn_states",
        "4",
        "B",
        "T/s",
        "H",
        "K",
        "V",
        "float32",
        "state",
        "at",
        "every",
        "s-th",
        "token",
    ]


# JAX's other implementations of jax.checkpoint --------------------

FLAGS = ("jax_remat3", "jax_custom_vjp3")


@pytest.mark.skipif(not all(hasattr(jax.config, flag) for flag in FLAGS), reason="this JAX has no such settings")
@pytest.mark.parametrize("flags", list(itertools.product((False, True), repeat=2)))
def test_names_are_honoured_or_a_warning_says_why_not(getkey, flags):
    before = [getattr(jax.config, flag) for flag in FLAGS]
    try:
        for flag, value in zip(FLAGS, flags):
            jax.config.update(flag, value)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            policy = remat.policy(gdn="device")
        layer, x = mixer(getkey()), jax.ShapeDtypeStruct((T, D), jnp.float32)
        if caught:
            assert flags[0]
            assert "jax_remat3" in str(caught[0].message) and "computed again" in str(caught[0].message).replace(
                "computes all again", "computed again"
            )
            with pytest.raises(ValueError, match="gdn = 'device' would save nothing.*jax_remat3"):
                remat.check(policy, lambda x: layer(x)[0], x)
        else:
            names = ("layer_input", "gdn_out", "gdn_states")
            size = sum(remat.NAMES[name].bytes(4, **SIZES | {"B": 1}) for name in names)
            assert remat.bytes_per_layer(policy, lambda x: layer(x)[0], x) == (size, 0)
    finally:
        for flag, value in zip(FLAGS, before):
            jax.config.update(flag, value)
