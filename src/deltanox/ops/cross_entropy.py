"""Cross entropy of a language model's head, over blocks of the vocabulary.

With hidden rows x_t [D], a head W [N D] and labels y_t,

    loss_t = log Σ_n exp(W_n · x_t) - W_{y_t} · x_t        (nats)

At a vocabulary of 248,320 the logits [T N] are by far the largest array of a training step. Here they exist for one
block of the vocabulary at a time, forward and backward: the forward pass keeps the running maximum and sum of
exponentials of every row, the backward pass makes the block's logits again and from them the softmax.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from ..remat import Policy
from ._compiled import compiled
from ._manual import alike, constants
from ._validate import require_kind, require_size, require_tokens


def cross_entropy(
    hidden: Float[Array, "*B T D"],
    head: Float[Array, "N D"],
    labels: Int[Array, "*B T"],
    *,
    mask: Bool[Array, "*B T"] | None = None,
    block_size: int = 8192,
    remat: Callable[..., Any] | None = None,
) -> Float[Array, "*B T"]:
    """Negative log-likelihood of `labels`, in nats, without the logits of the whole vocabulary in memory.

    **Arguments**:

    - `hidden`: what the model gives for each token, [*B T D].
    - `head`: one row per entry of the vocabulary, [N D], in the dtype of `hidden`. A tied embedding is passed as it is.
    - `labels`: the entry that follows, in [0, N).
    - `mask`: False where there is nothing to predict. The loss is 0 there, as are its gradients; labels and NaN in
      masked places stay out.
    - `block_size`: entries of the vocabulary whose logits are in memory together. A vocabulary that is not larger is
      one block, differentiated by JAX any number of times and in forward mode; a larger one has a custom VJP: one
      reverse-mode derivative.
    - `remat`: a policy of `deltanox.remat` (or for `jax.checkpoint`) that says whether the backward pass finds the
      `logits` of a single block saved; None saves them. Those of several blocks are always computed again.

    **Returns**: the losses [*B T] in float32 (float64 for float64 inputs). Products are accumulated, and the
    logarithm of the sum of exponentials is taken, in that dtype; the products have the precision of
    `jax_default_matmul_precision`. A label outside [0, N) in an unmasked place gives
    NaN.

    **Raises**: `ValueError` for shapes or dtypes that do not fit together, and for a policy that would save the logits
    of several blocks.
    """
    op = "cross_entropy"
    require_kind(op, "hidden", hidden, "*B T D")
    require_kind(op, "head", head, "N D")
    require_kind(op, "labels", labels, "*B T", kind="integer")
    require_tokens(op, mask=mask)
    if head.ndim != 2 or hidden.ndim < 2 or hidden.shape[-1] != head.shape[-1]:
        raise ValueError(
            f"cross_entropy: hidden [*B T D] and head [N D] must share their last axis, got hidden {hidden.shape} "
            f"and head {head.shape}; the head holds one row per entry of the vocabulary (transpose it if it is [D N])"
        )
    if hidden.dtype != head.dtype:
        raise ValueError(
            f"cross_entropy: hidden and head must have one dtype, got {hidden.dtype} and {head.dtype}; cast the head "
            "to the dtype that the model computes in"
        )
    if labels.shape != hidden.shape[:-1] or (mask is not None and mask.shape != labels.shape):
        raise ValueError(
            f"cross_entropy: labels and mask must be [*B T] = {hidden.shape[:-1]}, got labels {labels.shape} and mask "
            f"{None if mask is None else mask.shape}"
        )
    block_size = require_size(op, "block_size", block_size)
    return _losses(hidden, head, labels, mask, block_size=block_size, remat=remat)


@compiled("block_size", "remat")
def _losses(hidden, head, labels, mask, *, block_size, remat):
    x = hidden.reshape(-1, hidden.shape[-1])
    y = labels.reshape(-1)
    if mask is not None:
        real = mask.reshape(-1)
        x = jnp.where(real[:, None], x, jnp.zeros((), x.dtype))
        y = jnp.where(real, y, jnp.zeros((), y.dtype))
    size = head.shape[0]
    x, head, y = alike((x, head, y))
    if size <= block_size:
        one_block = _one_block if remat is None else jax.checkpoint(_one_block, policy=remat)
        losses: Array = one_block(x, head, y)
    else:
        place = dict(remat.given).get("logits", "remat") if isinstance(remat, Policy) else "remat"
        if place != "remat":
            raise ValueError(
                f"remat: logits = '{place}' would save nothing: the vocabulary of {size} entries is taken in blocks of "
                f"{block_size}, whose logits are never in memory together; set logits='remat', or "
                f"block_size={size} for cross_entropy"
            )
        losses = _blocks(x, head, y, block_size)  # type: ignore
    # A gather would wrap or clip such a label; a sum over blocks would leave it out. Neither may pass for a loss.
    losses = jnp.where((y >= 0) & (y < size), losses, jnp.full((), jnp.nan, losses.dtype))
    if mask is not None:
        losses = jnp.where(real, losses, jnp.zeros((), losses.dtype))
    return losses.reshape(labels.shape)


def _wide(dtype) -> jnp.dtype:
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def _logits(x: Float[Array, "R D"], head: Float[Array, "n D"]) -> Float[Array, "R n"]:
    return jax.lax.dot_general(x, head, (((1,), (1,)), ((), ())), preferred_element_type=_wide(x.dtype))


def _one_block(x: Float[Array, "R D"], head: Float[Array, "N D"], y: Int[Array, " R"]) -> Float[Array, " R"]:
    logits = checkpoint_name(_logits(x, head), "logits")
    label = jnp.take_along_axis(logits, y[:, None], axis=1, mode="clip")[:, 0]
    return jax.nn.logsumexp(logits, axis=1) - label


def _over_blocks(step, carry, head: Float[Array, "N D"], block_size: int):
    """`step(carry, rows of the head, their first index) -> (carry, out)` over equal blocks, and over what is left.

    The blocks are slices of the head where it lies: padding it to a multiple of the block would copy it.
    """
    size, width = head.shape
    full = size // block_size

    def body(carry, index):
        first = index * block_size
        rows = jax.lax.dynamic_slice(head, (first, jnp.zeros_like(first)), (block_size, width))
        return step(carry, rows, first)

    carry, outs = jax.lax.scan(body, carry, jnp.arange(full, dtype=jnp.int32))
    last = None
    if size % block_size:
        carry, last = step(carry, head[full * block_size :], jnp.asarray(full * block_size, jnp.int32))
    return carry, outs, last


def _hits(y: Int[Array, " R"], first: Int[Array, ""], size: int) -> Bool[Array, "R n"]:
    return (y - first.astype(y.dtype))[:, None] == jnp.arange(size, dtype=y.dtype)[None, :]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _blocks(
    x: Float[Array, "R D"], head: Float[Array, "N D"], y: Int[Array, " R"], block_size: int
) -> Float[Array, " R"]:
    return _blocks_forward(x, head, y, block_size)[0]


def _blocks_forward(x, head, y, block_size):
    wide = _wide(x.dtype)
    rows = x.shape[0]
    start = (jnp.full((rows,), -jnp.inf, wide), jnp.zeros((rows,), wide), jnp.zeros((rows,), wide))

    def step(carry, block, first):
        highest, total, label = carry
        logits = _logits(x, block)
        higher = jnp.maximum(highest, logits.max(axis=1))
        total = total * jnp.exp(highest - higher) + jnp.exp(logits - higher[:, None]).sum(axis=1)
        hits = _hits(y, first, block.shape[0])
        label = label + jnp.where(hits, logits, jnp.zeros((), wide)).sum(axis=1)
        return (higher, total, label), None

    (highest, total, label), _, _ = _over_blocks(step, constants(start, x), head, block_size)
    normaliser = highest + jnp.log(total)
    return normaliser - label, (x, head, y, normaliser)


def _blocks_backward(block_size, residuals, cotangent):
    return *_blocks_gradients(residuals, cotangent, block_size=block_size), None


@compiled("block_size")
def _blocks_gradients(residuals, cotangent, *, block_size):
    x, head, y, normaliser = residuals
    wide = _wide(x.dtype)

    def step(dx, block, first):
        softmax = jnp.exp(_logits(x, block) - normaliser[:, None])
        hits = _hits(y, first, block.shape[0])
        dlogits = ((softmax - hits.astype(wide)) * cotangent[:, None]).astype(x.dtype)
        dx = dx + jax.lax.dot_general(dlogits, block, (((1,), (0,)), ((), ())), preferred_element_type=wide)
        dblock = jax.lax.dot_general(dlogits, x, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        return dx, dblock.astype(head.dtype)

    dx, dblocks, dlast = _over_blocks(step, constants(jnp.zeros(x.shape, wide), x), head, block_size)
    dhead = dblocks.reshape(-1, head.shape[1])
    if dlast is not None:
        dhead = jnp.concatenate([dhead, dlast])
    return dx.astype(x.dtype), dhead


_blocks.defvjp(_blocks_forward, _blocks_backward)
