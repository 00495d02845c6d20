"""Depthwise causal convolution as a layer."""

from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from .._types import Implementation
from ..ops._validate import describe, require, require_kind, require_record, require_size, require_tokens
from ..ops.causal_conv import causal_conv1d, causal_conv1d_step
from ..ops.causal_conv.inputs import check_options
from ._linear import normal


class ConvState(eqx.Module):
    """The last W − 1 real inputs, oldest first, in the activations' dtype: all that a causal convolution remembers."""

    inputs: Float[Array, "past C"]


class CausalConv1d(eqx.Module):
    """Depthwise causal convolution over the tokens: y_t = act(Σ_w weight[:, w] ∘ x_{t−W+1+w} + bias).

    Tap W − 1 multiplies the current token. Sums are float32 and rounded once to x's dtype.

    - `weight`: [C W] ~ N(0, 0.02); Hugging Face's `conv1d.weight` [C 1 W] without its middle axis.
    - `bias`: [C], zeros, or None.

    Source: the mixer of Qwen3-Next and Qwen3.5 (width 4, SiLU, no bias).
    """

    weight: Float[Array, "C W"]
    bias: Float[Array, " C"] | None
    channels: int = eqx.field(static=True)
    conv_size: int = eqx.field(static=True)
    activation: Literal["silu"] | None = eqx.field(static=True)
    implementation: Implementation = eqx.field(static=True)

    def __init__(
        self,
        channels: int,
        conv_size: int,
        *,
        use_bias: bool = False,
        activation: Literal["silu"] | None = "silu",
        implementation: Implementation = "auto",
        dtype: DTypeLike = jnp.float32,
        key: PRNGKeyArray,
    ):
        """**Arguments:** `channels`: C; `conv_size`: W ≥ 1; `use_bias`; `activation`: "silu" or None;
        `implementation`: as in `deltanox.ops.causal_conv1d`; `dtype`: of weight and bias.

        **Raises:** `ValueError` for sizes below 1 and for options that don't exist.
        """
        for name, size in (("channels", channels), ("conv_size", conv_size)):
            require_size("CausalConv1d", name, size)
        check_options("CausalConv1d", activation=activation, implementation=implementation)
        self.weight = normal((channels, conv_size), dtype=dtype, key=key)
        self.bias = jnp.zeros((channels,), dtype) if use_bias else None
        self.channels = channels
        self.conv_size = conv_size
        self.activation = activation
        self.implementation = implementation

    def init_state(self, *, dtype: Any = None) -> ConvState:
        """Zeros, as before a document's first token. `dtype`: the activations', by default the weight's."""
        return ConvState(jnp.zeros((self.conv_size - 1, self.channels), self.weight.dtype if dtype is None else dtype))

    def __call__(
        self,
        x: Float[Array, "T C"],
        state: ConvState | None = None,
        *,
        segment_ids: Int[Array, " T"] | None = None,
        mask: Bool[Array, " T"] | None = None,
    ) -> tuple[Float[Array, "T C"], ConvState]:
        """Convolve a sequence, or the next part of one.

        **Arguments:**

        - `x`: inputs, one row a token.
        - `state`: what the last call returned; None is the start of a document. It belongs to the first segment.
        - `segment_ids`: packed documents: no tap crosses a change of the id.
        - `mask`: False at padding: counts as zero, puts out zero.

        **Returns:** `(y, state)`, y in x's dtype.

        **Raises:** `ValueError` where the shapes don't fit.
        """
        check_tokens("CausalConv1d", x, self.channels, "channels", segment_ids=segment_ids, mask=mask)
        if state is not None:
            require_record("CausalConv1d", "state", state, ConvState, remedy="take it from this layer's init_state")
        inputs = None if state is None else state.inputs
        if inputs is not None and x.shape[0] == 1 and mask is None:
            y, inputs = causal_conv1d_step(
                x[0], self.weight, self.bias, initial_state=inputs, activation=self.activation
            )
            return y[None], ConvState(inputs)
        y, inputs = causal_conv1d(
            x, self.weight, self.bias, initial_state=inputs, segment_ids=segment_ids, mask=mask,
            activation=self.activation, implementation=self.implementation,
        )  # fmt: skip
        return y, ConvState(inputs)


def check_tokens(op: str, x, size: int, letter: str, **arrays) -> None:
    """`x` must be one sequence [T, size], with `segment_ids` and `mask` [T]."""
    layer = "`jax.vmap(layer)(x)` in place of `layer(x)`"
    require_kind(op, "x", x, f"T {letter}")
    require(
        x.ndim == 2,
        f"{op}: `x` must be one sequence [T, {letter}] = [T, {size}], but it is {describe(x)}: "
        + (
            f"layers are unbatched, wrap in jax.vmap: {layer}"
            if x.ndim > 2
            else "add the axis of the tokens, as in x[None]"
        ),
    )
    require(
        x.shape[1] == size,
        f"{op}: the last axis of `x` must be the layer's {letter}, {size}, but x is {describe(x)}"
        + (": the axes are swapped, transpose x to [T, features]" if x.shape[0] == size else ""),
    )
    require(x.shape[0] >= 1, f"{op}: the axis T must not be empty, but x is {describe(x)}")
    require_tokens(op, **arrays)
    for name, value in arrays.items():
        require(
            value is None or value.shape == x.shape[:1],
            f"{op}: `{name}` must be [T] = [{x.shape[0]}], one value a token, but it is "
            f"{None if value is None else describe(value)}: "
            f"with a batch of it, wrap in jax.vmap as x",
        )
