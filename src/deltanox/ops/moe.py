"""Routing tokens to experts, and the experts' feed-forward parts as grouped products in which no token is dropped."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from ._compiled import compiled
from ._dtypes import accumulator
from ._grouped import block_dot
from ._moves import move_rows
from ._validate import require, require_array, require_arrays, require_kind, require_size, shapes


class Routing(NamedTuple):
    """Which experts a token goes to.

    `weights` [*B k] in the logits' dtype, `experts` int32 [*B k] by falling probability, `probabilities` [*B E] float32
    over all experts.
    """

    weights: Float[Array, "*B k"]
    experts: Int[Array, "*B k"]
    probabilities: Float[Array, "*B E"]


def route(logits: Float[Array, "*B E"], *, top_k: int, norm_topk_prob: bool = True) -> Routing:
    """p = softmax(logits) in float32; the `top_k` largest; divided by their sum in float32; rounded to the logits'
    dtype.

    Among equal probabilities the lower expert index comes first.

    **Arguments:** `logits`: the router's raw outputs (not probabilities) over all experts; `top_k`: experts a token;
    `norm_topk_prob`: whether the chosen weights are divided by their sum (True in all releases).

    **Returns:** `Routing`.

    **Raises:** `ValueError` if `top_k` isn't in 1 ... E or the logits aren't floating.

    Source: Qwen3-Next and Qwen3.5-MoE (transformers 5.24).
    """
    require_array("route", "logits", logits, "*B E")
    num_experts = logits.shape[-1]
    require_size("route", "top_k", top_k)
    require(
        1 <= top_k <= num_experts,
        f"route: `top_k` must lie in 1 ... E = {num_experts}, but it is {top_k} with {shapes(logits=logits)} [*B E]",
    )
    wide = accumulator(logits.dtype)
    probabilities = jax.nn.softmax(logits.astype(wide), axis=-1)
    weights, experts = jax.lax.top_k(probabilities, top_k)
    if norm_topk_prob:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return Routing(weights.astype(logits.dtype), experts.astype(jnp.int32), probabilities)


def expert_mlp(
    x: Float[Array, "*B D"],
    experts: Int[Array, "*B k"],
    weights: Float[Array, "*B k"],
    gate_up: Float[Array, "E J D"],
    down: Float[Array, "E D I"],
    *,
    mask: Bool[Array, "*B"] | None = None,
    block_size: int | None = None,
) -> Float[Array, "*B D"]:
    """y = Σ_k weights_k · down_e (silu(gate_e x) · up_e x) with e = experts_k, for every token, whatever the balance.

    Tokens are sorted by expert and laid out in blocks of one expert each; the work grows with the tokens and half a
    block an expert, not with tokens times experts. Differentiable in x, weights, gate_up and down, in both modes.
    Products have the precision of `jax_default_matmul_precision`.

    **Arguments:**

    - `x`: tokens; `experts`, `weights`: from `route`, k of each a token, any leading axes.
    - `gate_up`: J = 2I rows an expert, the I of the gate, then the I of up; `down`.
    - `mask`: False at tokens that go to no expert: their output is zero, and they cost nothing.
    - `block_size`: rows of a block; None picks a power of two between 8 and 256 by the mean load.

    **Returns:** x's shape and dtype; the sum over k is in float32.

    **Raises:** `ValueError` for shapes or dtypes that don't fit.
    """
    _check(x, experts, weights, gate_up, down, mask, block_size)
    return _experts(x, experts, weights, gate_up, down, mask, block_size=block_size)


@compiled("block_size")
def _experts(x, experts, weights, gate_up, down, mask, *, block_size):
    *batch, D = x.shape
    k, num_experts, inner = experts.shape[-1], gate_up.shape[0], down.shape[2]
    if x.size == 0:
        return jnp.zeros_like(x)
    tokens = x.reshape(-1, D)
    # k in front of the tokens from here on: a TPU pads the last two axes to whole tiles
    T, chosen, weights = tokens.shape[0], experts.reshape(-1, k).T, weights.reshape(-1, k).T
    if mask is not None:
        keep = mask.reshape(1, -1)
        # a weight of NaN at padding must not meet the zero that it multiplies
        weights = jnp.where(keep, weights, jnp.zeros((), weights.dtype))
        chosen = jnp.where(keep, chosen, num_experts)
    layout = lay_out(chosen.reshape(-1), num_experts, block_size)
    blocks, rows = layout.source.shape
    source, slot = layout.source.reshape(-1, 1), layout.slot
    token = jnp.where(source < k * T, source % T, T)
    laid = move_rows(tokens, token, slot.reshape(k, T).T).reshape(blocks, rows, D)
    product = partial(block_dot, group=layout.group, ordered=True)
    hidden = checkpoint_name(product(laid, gate_up.astype(x.dtype)), "moe_hidden")
    hidden = jax.nn.silu(hidden[..., :inner]) * hidden[..., inner:]
    out = checkpoint_name(product(hidden, down.astype(x.dtype)), "moe_out").reshape(blocks * rows, D)
    wide = accumulator(x.dtype)
    out = move_rows(out, slot[:, None], source).reshape(k, T, D).astype(wide)
    y = jnp.sum(out * weights[..., None].astype(wide), axis=0)
    return y.astype(x.dtype).reshape(*batch, D)


class Layout(NamedTuple):
    """M assignments sorted into G blocks of R rows, each block of one group.

    `source` [G R]: the assignment in each row, M where the row is empty; `group` [G]: the block's group, never falling,
    E where the block is empty; `slot` [M]: the row of each assignment (block · R + row), G·R for one of no group.
    """

    source: Int[Array, "G R"]
    group: Int[Array, "G"]
    slot: Int[Array, "M"]


def lay_out(groups: Int[Array, "M"], num_groups: int, block_size: int | None = None) -> Layout:
    """Blocks for assignments to groups 0 ... E - 1 (E or above: to none), as few as fit any balance."""
    M = groups.shape[0]
    used = min(num_groups, M)
    if block_size is None:
        block_size = 1 << (min(max(M // (2 * used), 8), 256).bit_length() - 1)
    R = block_size
    # every used group may fill its last block with one row only
    G = (M - used) // R + used
    order = jnp.argsort(groups, stable=True).astype(jnp.int32)
    size = jnp.sum(groups[:, None] == jnp.arange(num_groups, dtype=groups.dtype)[None], axis=0, dtype=jnp.int32)
    first = jnp.cumsum(size) - size
    last_block = jnp.cumsum((size + (R - 1)) // R)
    first_block = last_block - (size + (R - 1)) // R
    g = jnp.arange(G, dtype=jnp.int32)
    group = jnp.sum(g[:, None] >= last_block[None], axis=1, dtype=jnp.int32)
    owner = jnp.minimum(group, num_groups - 1)
    row = (g - first_block[owner])[:, None] * R + jnp.arange(R, dtype=jnp.int32)[None]
    filled = (group < num_groups)[:, None] & (row < size[owner][:, None])
    source = jnp.where(filled, order[jnp.where(filled, first[owner][:, None] + row, 0)], M)
    rank = jnp.argsort(order).astype(jnp.int32)
    own = jnp.minimum(groups, num_groups - 1)
    slot = jnp.where(groups < num_groups, first_block[own] * R + rank - first[own], G * R)
    return Layout(source, group, slot)


def _check(x, experts, weights, gate_up, down, mask, block_size) -> None:
    op = "expert_mlp"
    require_array(op, "x", x, "*B D")
    require_array(op, "experts", experts, "*B k", kind="integer")
    require_array(op, "weights", weights, "*B k")
    require_kind(op, "gate_up", gate_up, "E 2I D")
    require_kind(op, "down", down, "E D I")
    require_arrays(op, mask=mask)
    received = shapes(x=x, experts=experts, weights=weights, gate_up=gate_up, down=down, mask=mask)
    require(
        experts.shape == weights.shape and experts.shape[:-1] == x.shape[:-1],
        f"{op}: `experts` and `weights` must be [*B k] for x [*B D], but received {received}",
    )
    require(
        gate_up.ndim == down.ndim == 3
        and gate_up.shape[0] == down.shape[0]
        and gate_up.shape[2] == down.shape[1] == x.shape[-1]
        and gate_up.shape[1] == 2 * down.shape[2],
        f"{op}: `gate_up` must be [E 2I D] (gate rows, then up rows) and `down` [E D I] for x [*B D], but received "
        f"{received}: "
        "stack the experts' gate_proj and up_proj along the rows",
    )
    require(
        mask is None or (mask.shape == x.shape[:-1] and mask.dtype == jnp.bool_),
        f"{op}: `mask` must be bool [*B] for x [*B D], but received {received}",
    )
    if block_size is not None:
        require_size(op, "block_size", block_size)
