"""The two normalisations of Qwen3-Next and Qwen3.5: zero-centred, and gated with a plain weight."""

from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from ..ops._compiled import compiled
from ..ops._dtypes import accumulator, inverse_root
from ..ops._validate import describe, require, require_choice, require_kind, require_number, require_size
from ..ops.gated_norm import formula


def _check(op: str, size: int, **arrays: Array) -> None:
    for name, x in arrays.items():
        require_kind(op, name, x, "*B size")
        require(
            x.ndim >= 1 and x.shape[-1] == size,
            f"{op}: the last axis of `{name}` must be the norm's size {size}, but {name} is {describe(x)}: "
            f"build the norm with size={x.shape[-1] if x.ndim else '...'}, or split the features into heads of {size}",
        )


class RMSNorm(eqx.Module):
    """Zero-centred root-mean-square norm: y = x / √(mean(x²) + ε) · (1 + weight), over the last axis.

    The whole formula, `1 + weight` included, is evaluated in float32 and rounded once to x's dtype. The weight starts
    at zero. All norms of the models are of this kind except the mixer's gated one (`GatedRMSNorm`, whose weight is
    plain).

    Source: Qwen3-Next and Qwen3.5 (input, post-attention, q, k and final norm).
    """

    weight: Float[Array, " size"]
    size: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, size: int, *, eps: float = 1e-6, dtype: DTypeLike = jnp.float32):
        """**Arguments:** `size`: length of the last axis; `eps`: ε, inside the root; `dtype`: of the weight."""
        size, eps = require_size("RMSNorm", "size", size), require_number("RMSNorm", "eps", eps, least=0.0)
        self.weight = jnp.zeros((size,), dtype)
        self.size = size
        self.eps = eps

    def __call__(self, x: Float[Array, "*B size"]) -> Float[Array, "*B size"]:
        """**Arguments:** `x`: any leading axes, features last.  **Returns:** the same shape and dtype.

        **Raises:** `ValueError` if the last axis isn't `size`.
        """
        _check("RMSNorm", self.size, x=x)

        return _rms_norm(x, self.weight, eps=self.eps)


@compiled("eps")
def _rms_norm(x, weight, *, eps: float):
    @jax.checkpoint  # the backward pass keeps x alone: what is between costs less to compute than to read
    def norm(x, weight):
        wide = accumulator(x.dtype)
        y = x.astype(wide)
        root = inverse_root(jnp.mean(jnp.square(y), axis=-1, keepdims=True), eps)
        weight = weight.astype(wide) + jnp.asarray(1, wide)
        return (y * root * weight[(None,) * (x.ndim - 1)]).astype(x.dtype)

    return norm(x, weight)


class GatedRMSNorm(eqx.Module):
    """Norm, then gate: y = x / √(mean(x²) + ε) · weight · act(z), over the last axis, act SiLU or the logistic
    function.

    The weight is plain (not 1 + weight), starts at one, is shared by all heads and stays float32 under every cast.
    Everything is evaluated in float32 and rounded once; Hugging Face rounds to the activations' dtype before it
    multiplies by the weight as well, one ulp away in bfloat16 and equal in float32.

    Source: the gated DeltaNet mixer of Qwen3-Next and Qwen3.5; arXiv:2412.06464.
    """

    keep_float32: ClassVar[tuple[str, ...]] = ("weight",)

    weight: Float[Array, " size"]
    size: int = eqx.field(static=True)
    eps: float = eqx.field(static=True)
    gate: Literal["silu", "sigmoid"] = eqx.field(static=True)

    def __init__(self, size: int, *, eps: float = 1e-6, gate: Literal["silu", "sigmoid"] = "silu"):
        """**Arguments:** `size`: length of the last axis (a value head); `eps`: ε, inside the root; `gate`: the gate's
        activation."""
        size, eps = require_size("GatedRMSNorm", "size", size), require_number("GatedRMSNorm", "eps", eps, least=0.0)
        require_choice("GatedRMSNorm", "gate", gate, ("silu", "sigmoid"))
        self.weight = jnp.ones((size,), jnp.float32)
        self.size = size
        self.eps = eps
        self.gate = gate

    def __call__(self, x: Float[Array, "*B size"], z: Float[Array, "*B size"]) -> Float[Array, "*B size"]:
        """**Arguments:** `x`: what is normalised; `z`: the gate before its activation, of x's shape.

        **Returns:** x's shape and dtype.

        **Raises:** `ValueError` if the last axis isn't `size` or the shapes differ.
        """
        _check("GatedRMSNorm", self.size, x=x, z=z)
        require(
            x.shape == z.shape,
            f"GatedRMSNorm: `x` and `z` must have one shape, but x is {describe(x)} and z is {describe(z)}: "
            "reshape the gate's projection as the output",
        )

        return _gated_rms_norm(x, z, self.weight, eps=self.eps, gate=self.gate)


@compiled("eps", "gate")
def _gated_rms_norm(x, z, weight, *, eps: float, gate: str):
    @jax.checkpoint  # the backward pass keeps x and z alone
    def norm(x, z, weight):
        wide = accumulator(x.dtype)
        weight = weight.astype(wide)[(None,) * (x.ndim - 1)]
        return formula(x.astype(wide), z.astype(wide), weight, eps=eps, gate=gate).astype(x.dtype)

    return norm(x, z, weight)
