"""What JAX finds in a function when it is differentiated: names, and what is saved."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Literal
from jaxtyping import Array


class Traced(NamedTuple):
    """`names` that JAX asks the policy about; types of what is `saved` besides arguments; which arguments are `kept`
    (their arrays, flattened)."""

    names: frozenset[str]
    saved: list[Any]
    kept: list[bool]


def named_input(x: Array) -> Array:
    """`x` by the name of what a layer begins with.

    Behind the name is a copy, which costs nothing: a checkpoint inside the layer (a norm) that took the named array
    itself would save it a second time.
    """
    return jnp.copy(checkpoint_name(x, "layer_input"))


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def trace(fn: Callable[..., Any], args: Any, policy: Callable[..., Any]) -> Traced:
    """Linearise `fn(*args)` under `policy`: nothing runs, and only shapes and dtypes of arrays are looked at."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, x in enumerate(leaves) if _is_array(x)]
    names: set[str] = set()

    def asked(prim, *avals, **params):
        if prim.name == "name":
            names.add(params["name"])
        return policy(prim, *avals, **params)

    def run(*arrays):
        filled = list(leaves)
        for i, x in zip(places, arrays):
            filled[i] = x
        out = fn(*jax.tree.unflatten(tree, filled))
        return [x for x in jax.tree.leaves(out) if eqx.is_array(x)]

    structs = [jax.ShapeDtypeStruct(leaves[i].shape, leaves[i].dtype) for i in places]
    traced = jax.make_jaxpr(lambda *xs: jax.vjp(jax.checkpoint(run, policy=asked), *xs)[1])(*structs).jaxpr
    given = {*traced.invars, *traced.constvars}
    out = dict.fromkeys(v for v in traced.outvars if not isinstance(v, Literal))
    return Traced(frozenset(names), [v.aval for v in out if v not in given], [v in out for v in traced.invars])
