"""Depth as a loop: equal layers, their parameters stacked, run by one scan."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

from .. import remat as _remat
from ..ops._validate import require
from ..remat import named_input


class Stack(eqx.Module):
    """`depth` layers of equal structure, one after the other: x ← layer_i(x), i = 0 … depth − 1.

    The layers are one module whose arrays have a leading axis of length `depth`, and the loop over them is a
    `jax.lax.scan`: a model of 64 layers compiles as fast as one of 4. A layer is anything that is called as

        layer(x, state, **kwargs) -> (y, state, stats)

    with y of x's shape and dtype, `state` the layer's own or None, and `stats` a PyTree of arrays (or None) that are
    summed over the depth, such as the router's counts. Layers that aren't equal (three mixers and an attention) repeat
    as a period: make the period the layer.

    States are stacked as the parameters are, and handed in and out whole. States that come out and aren't used cost
    nothing under `jax.jit`, neither time nor memory, forward or backward.

    - `layers`: the stacked layer; `stack[i]` is a layer by itself.
    - `depth`: how many.
    - `remat`: what the backward pass finds saved, unless a call says otherwise. False: everything that it needs; True:
      only what goes from layer to layer (the rest is computed again, about a third more time); a policy of
      `deltanox.remat` or of `jax.checkpoint_policies`: what it says, layer by layer.
    - `unroll`: layers that one turn of the loop runs. More than one copy less and compile longer; beside `remat` leave
      it at 1 on a CPU, where XLA merges what an unrolled loop computes again with the first time.
    """

    layers: PyTree
    depth: int = eqx.field(static=True)
    remat: bool | Callable[..., Any] = eqx.field(static=True)
    unroll: int = eqx.field(static=True)

    def __init__(
        self,
        make_layer: Callable[[PRNGKeyArray], Any],
        depth: int,
        *,
        remat: bool | Callable[..., Any] = False,
        unroll: int = 1,
        key: PRNGKeyArray,
    ):
        """**Arguments:** `make_layer`: a layer from a key, the same structure for every key; `depth`: at least 1;
        `remat`, `unroll`: see above; `key`: split into one key a layer.

        **Raises:** `ValueError` for a depth or an unroll below 1.
        """
        if depth < 1:
            raise ValueError(
                f"Stack: `depth` must be at least 1, but it is {depth}: leave the stack out of a model without layers"
            )
        require(unroll >= 1, f"Stack: `unroll` must be at least 1, but it is {unroll}: 1 is a loop of {depth} turns")
        self.layers = eqx.filter_vmap(make_layer)(jax.random.split(key, depth))
        self.depth = depth
        self.remat = remat
        self.unroll = unroll

    def __len__(self) -> int:
        return self.depth

    def __getitem__(self, index: int) -> Any:
        """Layer `index` without the leading axis (negative: from the last)."""
        if not -self.depth <= index < self.depth:
            raise IndexError(f"Stack: there are {self.depth} layers, and no layer {index}")
        return jax.tree.map(lambda x: x[index] if eqx.is_array(x) else x, self.layers)

    def init_state(self, *args: Any, **kwargs: Any) -> PyTree:
        """Every layer's `init_state(*args, **kwargs)`, stacked on a leading axis."""
        return eqx.filter_vmap(lambda layer: layer.init_state(*args, **kwargs), axis_size=self.depth)(self.layers)

    def __call__(
        self,
        x: Float[Array, "T D"],
        states: PyTree | None = None,
        *,
        remat: bool | Callable[..., Any] | None = None,
        **kwargs: Any,
    ) -> tuple[Float[Array, "T D"], PyTree, PyTree]:
        """Run all layers.

        **Arguments:**

        - `x`: input of the first layer.
        - `states`: stacked states, of `init_state` or of an earlier call; None hands None to every layer.
        - `remat`: what the backward pass finds saved; None is the stack's own.
        - `kwargs`: handed to every layer as they are (segment ids, masks, positions).

        **Returns:** `(y, states, stats)`: the last layer's output, the new states stacked, and the statistics summed
        over the layers.

        **Raises:** `ValueError` if the states' leading axes aren't `depth`, and for a policy of `deltanox.remat` that
        the layers cannot follow (`deltanox.remat.check`).
        """
        for leaf in jax.tree.leaves(states):
            if not (hasattr(leaf, "shape") and leaf.shape[:1] == (self.depth,)):
                raise ValueError(
                    f"Stack: every array in `states` must begin with an axis of depth = {self.depth}, but one has the "
                    f"shape "
                    f"{getattr(leaf, 'shape', type(leaf).__name__)}: make the states with `init_state`, or map a "
                    f"batch with jax.vmap"
                )
        remat = self.remat if remat is None else remat
        return _compiled_run(self.layers, x, states, kwargs, remat, self.unroll)


def _run(layers: PyTree, x: Float[Array, "T D"], states: PyTree, kwargs: dict[str, Any], remat: Any, unroll: int):
    """The loop over the depth."""
    arrays, static = eqx.partition(layers, eqx.is_array)

    def layer(x, layer_and_state, kwargs):
        layer, state = layer_and_state
        y, state, stats = eqx.combine(layer, static)(named_input(x), state, **kwargs)
        return y, (state, stats)

    if isinstance(remat, _remat.Policy):
        one = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), (arrays, states))
        _remat.check(remat, layer, x, one, kwargs, scope="layer")

    def body(x, layer_and_state):
        return layer(x, layer_and_state, kwargs)

    if remat:
        # Inside a loop nothing can be merged across the recomputation, so the barriers against that are left out
        policy = None if remat is True else remat
        body = eqx.filter_checkpoint(body, prevent_cse=unroll > 1, policy=policy)
    y, (states, stats) = jax.lax.scan(body, x, (arrays, states), unroll=unroll)
    return y, states, jax.tree.map(lambda s: jnp.sum(s, axis=0, dtype=s.dtype), stats)


# Outside `jax.jit` the loop is compiled once, not at every call (see `ops._compiled`). It is not traced in place, so
# that its transpose is compiled once too.
_compiled_run = eqx.filter_jit(_run)
