"""Low-rank adaptation of linear layers, in a model that is there already."""

import math
from collections.abc import Callable
from typing import ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from ..ops._validate import require, require_number, require_size

Tree = TypeVar("Tree")


class LoRALinear(eqx.Module):
    """A linear layer without bias whose weight is W + (alpha / rank) · up down, W held fixed.

    It stands in the place of an `eqx.nn.Linear`. Layers apply it by `apply_linear`, as
    x Wᵀ + (alpha / rank) (x downᵀ) upᵀ: rounded into a weight of 16 bits, a change below 0.4 % of |W| would be lost.
    Gradients reach `up` and `down` alone. `weight` is the sum, for `merge_lora`. A stacked layer's arrays have the
    stack's axes in front. `Precision` keeps `up` and `down` in float32, whatever the base is stored in.

    Source: arXiv:2106.09685.
    """

    keep_float32: ClassVar[tuple[str, ...]] = ("up", "down")

    base: Float[Array, "*S O I"]
    up: Float[Array, "*S O rank"]
    down: Float[Array, "*S rank I"]
    scale: float = eqx.field(static=True)

    @property
    def weight(self) -> Float[Array, "*S O I"]:
        """The sum, in the base's dtype; the product of `up` and `down` in theirs."""
        change = jnp.asarray(self.scale, self.up.dtype) * jnp.matmul(self.up, self.down, precision="highest")
        return jax.lax.stop_gradient(self.base) + change.astype(self.base.dtype)


def _is_linear(node) -> bool:
    return isinstance(node, eqx.nn.Linear | LoRALinear)


def add_lora(
    model: Tree,
    rank: int,
    *,
    alpha: float | None = None,
    where: Callable[[str], bool] = lambda path: True,
    key: PRNGKeyArray,
) -> Tree:
    """`model` with `LoRALinear` in the place of its linear layers, which changes nothing until `up` is trained.

    **Arguments:**

    - `model`: any PyTree of layers; linear layers are found in whichever container they lie.
    - `rank`: of the change; `alpha`: it is scaled by alpha / rank, None is alpha = rank.
    - `where`: which linear layers, by their path, such as ".layers.layers.blocks[0].mixer.in_proj_qkv". All by default,
      also routers.
    - `key`: for `down` ~ N(0, 1 / I) in float32; `up` is zero.

    **Returns:** the model. Train `up` and `down`: `eqx.partition(model, lora_filter(model))` parts them from the rest.

    **Raises:** `ValueError` for a rank below 1, if no linear layer is chosen, or one with a bias.
    """
    rank = require_size("add_lora", "rank", rank)
    scale = 1.0 if alpha is None else require_number("add_lora", "alpha", alpha) / rank
    nodes, tree = jax.tree_util.tree_flatten_with_path(model, is_leaf=_is_linear)
    adapted = []
    for i, (path, node) in enumerate(nodes):
        if isinstance(node, eqx.nn.Linear) and where(jax.tree_util.keystr(path)):
            require(
                node.bias is None,
                f"add_lora: `{jax.tree_util.keystr(path)}` has a bias, which would be lost: leave the layer out by "
                "`where`",
            )
            *stack, rows, columns = node.weight.shape
            down = jax.random.normal(jax.random.fold_in(key, i), (*stack, rank, columns), jnp.float32)
            up = jnp.zeros((*stack, rows, rank), jnp.float32)
            node = LoRALinear(node.weight, up, down / jnp.float32(math.sqrt(columns)), scale)
        adapted.append(node)
    require(
        any(isinstance(node, LoRALinear) for node in adapted),
        "add_lora: there must be a linear layer to adapt, but `where` chooses none: print the paths that it is given",
    )
    return jax.tree.unflatten(tree, adapted)


def merge_lora(model: Tree) -> Tree:
    """`model` with linear layers of the summed weights in the place of every `LoRALinear`: it is saved as a model that
    was never adapted.

    It computes the same but for the rounding of the sum to the dtype of the weights. In bfloat16 that loses changes
    below 0.4 % of a weight: cast the model to float32 before, where they must be kept."""

    def merge(node):
        if not isinstance(node, LoRALinear):
            return node
        rows, columns = node.base.shape[-2:]
        key = jax.eval_shape(lambda: jax.random.key(0))
        plain = eqx.filter_eval_shape(
            lambda key: eqx.nn.Linear(columns, rows, use_bias=False, dtype=node.base.dtype, key=key), key
        )
        return eqx.tree_at(lambda layer: layer.weight, plain, node.weight)

    return jax.tree.map(merge, model, is_leaf=_is_linear)


def lora_filter(model: Tree) -> Tree:
    """True at `up` and `down` of every `LoRALinear`, False elsewhere: a filter for `eqx.partition`."""

    def mark(node):
        if not isinstance(node, LoRALinear):
            return jax.tree.map(lambda _: False, node)
        return eqx.tree_at(lambda layer: (layer.base, layer.up, layer.down), node, (False, True, True))

    return jax.tree.map(mark, model, is_leaf=_is_linear)
