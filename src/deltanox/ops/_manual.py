"""Ops inside `jax.shard_map`, which tracks for each array over which mesh axes it varies."""

from typing import Any

import jax


def _axes(x) -> frozenset:
    return getattr(jax.typeof(x).manual_axis_type, "varying", frozenset())


def alike(tree: Any) -> Any:
    """The same tree, in which every array varies over the axes that any of them varies over.

    A `custom_vjp` gives each argument a cotangent that varies as all of them do; of an argument that is the same on all
    devices, such as a weight, JAX then takes the sum over them.
    """
    axes = frozenset().union(*map(_axes, jax.tree.leaves(tree)))

    def cast(x):
        missing = tuple(axes - _axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree) if axes else tree


def constants(tree: Any, like: jax.Array) -> Any:
    """Arrays made here, such as what a loop starts from, varying as `like` does."""
    return alike((tree, like))[0]


def result(shape: tuple[int, ...], dtype, like) -> jax.ShapeDtypeStruct:
    """What a kernel returns, varying as its argument `like` does."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(like).manual_axis_type)
