"""The mixer, its convolution and its rule against transformers' own, with copied weights."""

import importlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hf
from deltanox.nn import GatedDeltaNet
from deltanox.ops import causal_conv1d, causal_conv1d_step, gated_delta_rule
from deltanox.precision import Precision
from helpers import rel
from hf import torch

pytestmark = hf.MARKS

D = 32
TOLERANCE = 1e-5  # relative L2, float32 on both sides
MODULES = {
    "qwen3_5": ("modeling_qwen3_5", "Qwen3_5GatedDeltaNet", "configuration_qwen3_5", "Qwen3_5TextConfig"),
    "qwen3_next": ("modeling_qwen3_next", "Qwen3NextGatedDeltaNet", "configuration_qwen3_next", "Qwen3NextConfig"),
}


def draw(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def sizes_of(ratio):
    return dict(num_key_heads=3, num_value_heads=3 * ratio, key_head_size=8, value_head_size=12)


def pair(family, ratio, *, seed=0, **options):
    """Theirs and ours with the same weights, large enough to matter; A_log and dt_bias as trained models have them."""
    package = f"transformers.models.{family}"
    model, module, configuration, config = MODULES[family]
    s = sizes_of(ratio)
    config = getattr(importlib.import_module(f"{package}.{configuration}"), config)(
        hidden_size=D, linear_num_key_heads=s["num_key_heads"], linear_num_value_heads=s["num_value_heads"],
        linear_key_head_dim=s["key_head_size"], linear_value_head_dim=s["value_head_size"], linear_conv_kernel_dim=4,
        num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, vocab_size=64,
    )  # fmt: skip
    theirs = hf.randomise(getattr(importlib.import_module(f"{package}.{model}"), module)(config, 0), seed, 0.4)
    with torch.no_grad():
        theirs.A_log.copy_(torch.log(torch.linspace(0.01, 16, s["num_value_heads"])))
        theirs.norm.weight.add_(1.0)
    ours = GatedDeltaNet(D, **s, **options, key=jax.random.key(0))
    return theirs, hf.copy_delta_net(ours, theirs)


def forward(theirs, x, mask=None):
    with torch.no_grad():
        return hf.numpy(theirs(torch.tensor(x), attention_mask=None if mask is None else torch.tensor(mask)))


@eqx.filter_jit
def batched(layer, x, mask=None):
    return jax.vmap(lambda x, mask: layer(x, mask=mask)[0], in_axes=(0, None if mask is None else 0))(x, mask)


@pytest.mark.parametrize("family", MODULES)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_layer(family, ratio):
    """H / h of 1, 2 and 4, K ≠ V, T ≠ H, T beyond a chunk; Qwen3-Next's fused projections converted."""
    theirs, ours = pair(family, ratio)
    x = draw(1, 2, 71, D)
    assert rel(batched(ours, jnp.asarray(x)), forward(theirs, x)) < TOLERANCE


@pytest.mark.parametrize("family", MODULES)
def test_left_padding(family):
    """Row 1: left padding, a batch of one too; where the mask is False their outputs are their own affair."""
    theirs, ours = pair(family, 2)
    for lengths in ([6], [13, 9, 1]):
        x = draw(2, len(lengths), 13, D)
        mask = np.arange(13)[None] >= 13 - np.array(lengths)[:, None]
        want = forward(theirs, x, mask.astype(np.int64))
        assert rel(np.asarray(batched(ours, jnp.asarray(x), jnp.asarray(mask)))[mask], want[mask]) < TOLERANCE


def test_gradients():
    """Of the inputs and of every parameter."""
    theirs, ours = pair("qwen3_5", 2)
    x, cotangent = draw(3, 1, 13, D), draw(4, 1, 13, D)
    leaf = torch.tensor(x, requires_grad=True)
    theirs(leaf).backward(torch.tensor(cotangent))

    @eqx.filter_jit
    def gradient(layer, x):
        return eqx.filter_grad(lambda args: jnp.sum(args[0](args[1])[0] * jnp.asarray(cotangent[0], x.dtype)))(
            (layer, x)
        )

    dlayer, dx = gradient(ours, jnp.asarray(x[0]))
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda a: a.astype(jnp.float64) if eqx.is_inexact_array(a) else a, ours)
        exact_layer, exact = gradient(wide, jnp.asarray(x[0], jnp.float64))
    want = hf.copy_delta_net(jax.tree.map(jnp.zeros_like, dlayer), theirs, gradients=True)
    names = ("x", "qkv", "z", "b", "a", "conv", "A_log", "dt_bias", "norm", "out")
    leaves = [
        (dx, hf.numpy(leaf.grad)[0], exact),
        *zip(*map(jax.tree.leaves, (dlayer, want, exact_layer)), strict=True),
    ]
    for name, (a, b, c) in zip(names, leaves, strict=True):
        # A_log's and dt_bias's: sums of terms of both signs, in float32 on both sides
        factor = 5 if name in ("A_log", "dt_bias") else 1
        assert rel(a, c) < factor * TOLERANCE, name
        # PyTorch's float32 gradients are 1e-6 to 4e-5 away from float64, by the processor
        assert rel(b, c) < factor * 1e-4, name


def test_decoding():
    """Row 53: prefill, then tokens one by one with transformers' cache."""
    from transformers import DynamicCache

    theirs, ours = pair("qwen3_5", 2)
    x = draw(5, 1, 9, D)
    config = importlib.import_module("transformers.models.qwen3_5.configuration_qwen3_5").Qwen3_5TextConfig(
        num_hidden_layers=4
    )
    cache = DynamicCache(config=config)
    run = eqx.filter_jit(lambda x, state: ours(x, state))
    state, start = None, 0
    for size in (5, 1, 1, 2):
        with torch.no_grad():
            want = hf.numpy(theirs(torch.tensor(x[:, start : start + size]), cache=cache))
        got, state = run(jnp.asarray(x[0, start : start + size]), state)
        assert rel(got, want[0]) < TOLERANCE
        start += size
    assert rel(state.recurrent, hf.numpy(cache.get_recurrent_state(0, state_idx=0))[0]) < TOLERANCE
    assert rel(state.conv, hf.numpy(cache.get_conv_state(0, state_idx=0))[0].T[1:]) < 1e-6


@pytest.mark.parametrize("ratio", [1, 2])
def test_strict_rounding(ratio):
    """In bfloat16, transformers' roundings bring us nearer to its outputs; both are as near to float32 as it is."""
    theirs, ours = pair("qwen3_5", ratio)
    _, strict = pair("qwen3_5", ratio, strict_hf_rounding=True)
    x = torch.tensor(draw(6, 4, 64, D)).bfloat16()
    exact = forward(theirs, x.float())
    theirs.bfloat16()
    with torch.no_grad():
        want = hf.numpy(theirs(x))

    def low(layer):
        layer = Precision(compute="bfloat16").cast_compute(layer)
        # transformers rounds these as well: not of interest here
        rounded = [a.astype(jnp.bfloat16).astype(jnp.float32) for a in (layer.A_log, layer.dt_bias, layer.norm.weight)]
        layer = eqx.tree_at(lambda m: (m.A_log, m.dt_bias, m.norm.weight), layer, rounded)
        return np.asarray(batched(layer, jnp.asarray(hf.numpy(x)).astype(jnp.bfloat16)).astype(jnp.float32))

    plain, near = low(ours), low(strict)
    print(
        "to transformers: plain",
        rel(plain, want),
        "strict",
        rel(near, want),
        "; to float32:",
        rel(plain, exact),
        rel(want, exact),
    )
    assert rel(near, want) < 0.8 * rel(plain, want)
    assert rel(plain, exact) < 1.2 * rel(want, exact)


def test_convolution():
    """Their convolution, prefill and cached decode (their state holds W inputs, ours W − 1)."""
    theirs = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    x, weight, bias = draw(7, 2, 11, 6), draw(8, 6, 4), draw(9, 6)
    want = theirs.causal_conv1d_fn(
        torch.tensor(x).transpose(1, 2), torch.tensor(weight), torch.tensor(bias), activation="silu"
    )
    x, weight, bias = map(jnp.asarray, (x, weight, bias))
    y, state = causal_conv1d(x[:, :10], weight, bias, activation="silu")
    last, state = causal_conv1d_step(x[:, 10], weight, bias, initial_state=state, activation="silu")
    assert rel(jnp.concatenate([y, last[:, None]], axis=1), hf.numpy(want.transpose(1, 2))) < 1e-6
    cache = torch.tensor(np.array(x[:, 6:10])).transpose(1, 2).contiguous()
    step = theirs.causal_conv1d_update(
        torch.tensor(np.array(x[:, 10:])).transpose(1, 2),
        cache,
        torch.tensor(np.array(weight)),
        torch.tensor(np.array(bias)),
        activation="silu",
    )
    assert rel(last, hf.numpy(step)[..., 0]) < 1e-6
    assert np.array_equal(state, hf.numpy(cache.transpose(1, 2))[:, 1:])


def test_rule():
    """Row 57: their chunked rule, all sizes different, with a state before it."""
    theirs = importlib.import_module("transformers.models.qwen3_5.modeling_qwen3_5")
    B, T, h, H, K, V = 2, 77, 3, 6, 5, 7
    q, k, v, state = draw(1, B, T, h, K), draw(2, B, T, h, K), draw(3, B, T, H, V), draw(4, B, H, K, V)
    g, beta = -np.exp(draw(5, B, T, H)), 1 / (1 + np.exp(-draw(6, B, T, H)))
    out, last = theirs.torch_chunk_gated_delta_rule(
        *map(torch.tensor, (q, k, v)), g=torch.tensor(g), beta=torch.tensor(beta), initial_state=torch.tensor(state),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    ours = jax.jit(lambda *x, state: gated_delta_rule(*x, initial_state=state, use_qk_l2norm=True))
    y, end = ours(*map(jnp.asarray, (q, k, v, g, beta)), state=jnp.asarray(state))
    assert rel(y, hf.numpy(out)) < TOLERANCE and rel(end, hf.numpy(last)) < TOLERANCE
