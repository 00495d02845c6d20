"""The table [lora] of a config: which linear layers are adapted."""

from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import PRNGKeyArray

from deltanox.nn import add_lora
from deltanox.train._settings import LoraConfig

Tree = TypeVar("Tree")

_LEFT_OUT = frozenset({"gate", "shared_expert_gate"})  # routers, by the names of SparseMoE's fields


def adapt(model: Tree, config: LoraConfig | None, *, key: PRNGKeyArray) -> Tree:
    """`model` with the low-rank changes of `config`, or as it is.

    **Raises**: `ValueError` for a target that is no linear layer of the model.
    """
    if config is None:
        return model
    names = _linear_names(model)
    unknown = [name for name in config.targets if name not in names]
    if unknown:
        raise ValueError(
            f"config: lora.targets must be names of linear layers, but the model has no `{unknown[0]}`: it has "
            f"{', '.join(sorted(names))}"
        )
    targets = set(config.targets) or names - _LEFT_OUT
    return add_lora(
        model, config.rank, alpha=config.alpha or None, where=lambda path: _last(path) in targets, key=key
    )  # fmt: skip


def _linear_names(model: Any) -> set[str]:
    def is_linear(node: Any) -> bool:
        return isinstance(node, eqx.nn.Linear)

    nodes = jax.tree_util.tree_leaves_with_path(model, is_leaf=is_linear)
    return {_last(jax.tree_util.keystr(path)) for path, node in nodes if is_linear(node)}


def _last(path: str) -> str:
    return path.rpartition(".")[2]
