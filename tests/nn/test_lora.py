"""Low-rank changes of linear layers: they start as nothing, train alone, and merge exactly (row 73)."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.models import Qwen3_5Config, qwen3_5
from deltanox.nn import GatedDeltaNet, LoRALinear, add_lora, lora_filter, merge_lora
from deltanox.nn._linear import apply_linear, linear
from deltanox.ops import Residuals
from deltanox.precision import Precision
from helpers import rel

PROJECTIONS = ["in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj"]
run = eqx.filter_jit(lambda layer, x: layer(x)[0])


@pytest.fixture(scope="module")
def layer():
    return GatedDeltaNet(
        16, num_key_heads=2, num_value_heads=4, key_head_size=4, value_head_size=6, key=jax.random.key(0)
    )


def trained(model, seed=1):
    """`up` drawn, as if it had been trained."""

    def draw(node):
        if not isinstance(node, LoRALinear):
            return node
        return eqx.tree_at(lambda m: m.up, node, jax.random.normal(jax.random.key(seed), node.up.shape))

    return jax.tree.map(draw, model, is_leaf=lambda node: isinstance(node, LoRALinear))


@pytest.mark.parametrize("name", PROJECTIONS)
def test_each_projection_merges(layer, name):
    x = jax.random.normal(jax.random.key(2), (9, 16))
    adapted = add_lora(layer, 3, alpha=6.0, where=lambda path: path == f".{name}", key=jax.random.key(3))
    assert getattr(adapted, name).scale == 2.0
    assert np.array_equal(getattr(adapted, name).weight, getattr(layer, name).weight)
    changed = trained(adapted)
    weight = getattr(layer, name).weight + 2 * getattr(changed, name).up @ getattr(changed, name).down
    np.testing.assert_allclose(getattr(changed, name).weight, weight, atol=1e-5)
    merged = merge_lora(changed)
    assert jax.tree.structure(merged) == jax.tree.structure(layer)
    unmerged, together, before = run(changed, x), run(merged, x), run(layer, x)
    assert np.abs(np.asarray(unmerged - together)).max() <= 1e-6
    assert np.abs(np.asarray(together - before)).max() > 1e-4


def slight(model, size):
    """`up` such that the change of every `LoRALinear` is `size` times its weight in norm."""

    def draw(node):
        if not isinstance(node, LoRALinear):
            return node
        up = jax.random.normal(jax.random.key(5), node.up.shape)
        norm = jnp.linalg.norm(node.scale * up @ node.down)
        return eqx.tree_at(lambda m: m.up, node, size * jnp.linalg.norm(node.base.astype(jnp.float32)) / norm * up)

    return jax.tree.map(draw, model, is_leaf=lambda node: isinstance(node, LoRALinear))


def test_a_slight_change_shows_in_bfloat16():
    """A change of 0.1 % of |W|, which a weight in bfloat16 rounds away, moves the outputs by what it is in float32."""
    layer = linear(64, 96, key=jax.random.key(0))
    layer = eqx.tree_at(lambda layer: layer.weight, layer, layer.weight.astype(jnp.bfloat16))
    layer = slight(add_lora([layer], 2, alpha=6.0, key=jax.random.key(1)), 1e-3)[0]
    x = jax.random.normal(jax.random.key(2), (2000, 64)).astype(jnp.bfloat16)
    change = layer.scale * x.astype(jnp.float32) @ layer.down.T @ layer.up.T
    got, without = (apply_linear(m, x) for m in (layer, eqx.tree_at(lambda m: m.up, layer, 0 * layer.up)))
    assert got.dtype == jnp.bfloat16
    moved = got.astype(jnp.float32) - without.astype(jnp.float32)
    assert abs(float(jnp.sum(moved * change) / jnp.sum(change * change)) - 1) < 0.1
    exact = x.astype(jnp.float32) @ layer.base.astype(jnp.float32).T + change
    assert rel(got, exact.astype(jnp.bfloat16)) < 1e-3

    def loss(up, down):
        return jnp.sum(apply_linear(eqx.tree_at(lambda m: (m.up, m.down), layer, (up, down)), x).astype(jnp.float32))

    d_up, d_down = jax.grad(loss, (0, 1))(layer.up, layer.down)
    ones, wide = jnp.ones((2000, 96)), x.astype(jnp.float32)
    assert rel(d_up, layer.scale * ones.T @ (wide @ layer.down.T)) < 1e-2
    assert rel(d_down, layer.scale * (ones @ layer.up).T @ wide) < 1e-2


@pytest.mark.parametrize("residuals", [Residuals(), Residuals(qkv="recompute")], ids=["save", "recompute"])
def test_no_change_is_added_to_a_weight_in_a_layer(residuals):
    """By the program, since XLA may keep more digits of such a sum than bfloat16 has: with heads of 128 features, whose
    norm and projection "auto" takes together, and with projections that run twice."""
    layer = GatedDeltaNet(
        32, num_key_heads=1, num_value_heads=1, key_head_size=16, value_head_size=128, residuals=residuals,
        key=jax.random.key(0),
    )  # fmt: skip
    layer = Precision(compute="bfloat16").cast_compute(add_lora(layer, 2, key=jax.random.key(1)))
    shapes = {f"{rows},{columns}" for rows, columns in (getattr(layer, name).base.shape for name in PROJECTIONS)}
    sums = re.compile(rf":[a-z0-9]+\[({'|'.join(shapes)})\][^=\n]* = add ")
    assert sums.search(str(jax.make_jaxpr(lambda layer: layer.out_proj.weight)(layer)))  # what is looked for
    x = jnp.zeros((7, 32), jnp.bfloat16)
    assert not sums.search(str(jax.make_jaxpr(lambda layer, x: layer(x)[0])(layer, x)))


@pytest.mark.slow
def test_whole_model():
    """Stacked layers, gradients of `up` and `down` alone, and a step that lowers the loss."""
    config = Qwen3_5Config(
        vocab_size=30, embed_size=16, num_layers=4, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
        key_head_size=8, value_head_size=4, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=16,
    )  # fmt: skip
    model = eqx.filter_jit(qwen3_5)(config, key=jax.random.key(0))
    adapted = add_lora(model, 2, where=lambda path: ".mixer." in path, key=jax.random.key(1))
    parts, rest = eqx.partition(adapted, lora_filter(adapted))
    sizes = [x.shape for x in jax.tree.leaves(parts)]
    assert len(sizes) == 2 * (5 + 4) and all(shape[0] == 2 and 2 in shape[1:] for shape in sizes)
    tokens = jnp.arange(12) % 30

    @eqx.filter_jit
    @eqx.filter_value_and_grad
    def loss(parts, rest):
        logits, _ = eqx.combine(parts, rest)(tokens[:-1])
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(11), tokens[1:]])

    first, gradients = loss(parts, rest)
    assert all(x.any() for x in jax.tree.leaves(gradients)[::2])
    for _ in range(3):
        value, gradients = loss(parts, rest)
        parts = jax.tree.map(lambda x, g: x - 3 * g, parts, gradients)
    assert loss(parts, rest)[0] < first
    merged = merge_lora(eqx.combine(parts, rest))
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    assert np.array_equal(merged.embedding, model.embedding)
    got, want = run(merged, tokens), run(eqx.combine(parts, rest), tokens)
    assert np.abs(np.asarray(got - want)).max() <= 1e-6


def test_refusals(layer):
    with pytest.raises(ValueError, match="add_lora: `rank` must be at least 1, but it is 0"):
        add_lora(layer, 0, key=jax.random.key(0))
    with pytest.raises(ValueError, match="add_lora: there must be a linear layer to adapt, but `where` chooses none"):
        add_lora(layer, 2, where=lambda path: "q_proj" in path, key=jax.random.key(0))
    with pytest.raises(ValueError, match=r"add_lora: `\[0\]` has a bias, which would be lost: leave the layer out"):
        add_lora([eqx.nn.Linear(2, 3, key=jax.random.key(0))], 1, key=jax.random.key(0))
