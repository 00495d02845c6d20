"""The public op: shapes, packing and dispatch. The definition is in `reference.py`, the fast pass in `vjp.py`."""

import math
from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._types import Implementation, Mask, SegmentIds
from .._compiled import compiled
from .._dtypes import accumulator
from .._manual import alike
from .._segments import boundaries
from .._validate import require
from .inputs import check_options, check_shapes
from .reference import reference
from .shifted import activate, chunked, final_state
from .tpu import reason_against
from .vjp import conv


def causal_conv1d(
    x: Float[Array, "*B T C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, " C"] | None = None,
    *,
    initial_state: Float[Array, "*B W-1 C"] | None = None,
    segment_ids: SegmentIds | None = None,
    mask: Mask | None = None,
    activation: Literal["silu"] | None = None,
    implementation: Implementation = "auto",
) -> tuple[Float[Array, "*B T C"], Float[Array, "*B W-1 C"]]:
    r"""Depthwise causal convolution over the tokens, with its activation:

        y_t = act( Σ_w weight[:, w] ∘ x_{t−W+1+w} + bias ),        w = 0 … W−1

    Tap W − 1 multiplies the current token. Sums are taken in float32 (float64 for float64 inputs) and rounded once.

    Arguments:
        x: inputs, any float dtype.
        weight: one row of taps a channel, any float dtype; W ≥ 1.
        bias: added before the activation; None is no bias.
        initial_state: the W − 1 inputs before the first real token, oldest first, in x's dtype; None is zeros. It
            belongs to the first segment.
        segment_ids: documents packed in a row: any change between neighbours is a boundary, which no tap crosses.
        mask: False at padding. A masked input counts as zero and its output is zero; its value (NaN included) and its
            segment id are not looked at. Masked tokens before the first real one are skipped, so that the initial
            state lies right before it: outputs of real tokens, states and gradients of a padded call are those of the
            unpadded one.
        activation: "silu", or None.
        implementation: see below. "auto" is "pallas" where it is compiled for a TPU and the kernels can take the
            inputs, "xla" otherwise.

    Returns: `(y, final_state)`, both in x's dtype: final_state [*B W-1 C] holds the last W − 1 real inputs of the
        last segment, the initial state's among them where the row is shorter and still the first segment, zeros
        before a segment's start. It is empty for W = 1.

    | implementation | what it is | derivatives |
    |---|---|---|
    | "xla" | a sum of W shifted copies, with a hand-derived backward; only the inputs are kept | reverse mode, once |
    | "chunked" | the same pass, differentiated by JAX | forward and reverse mode, any number of times |
    | "reference" | token by token in float64 | reverse mode, once; all under jax_enable_x64 |
    | "pallas" | one TPU kernel for each direction; only the inputs are kept | reverse mode, once |

    The TPU kernels take bfloat16 and float32, C a multiple of 128 and W up to 8, and sum in float32. On a CPU, "pallas"
    interprets them, which is slow: for checks.

    Raises: ValueError with the argument, the shapes received and the remedy; for "pallas" also with what the kernels
        cannot take. NotImplementedError at a second derivative of "xla" and "pallas", and where "pallas" is compiled
        for a platform that is neither TPU nor CPU.

    Source: the mixer of Qwen3-Next and Qwen3.5 (Hugging Face's `conv1d.weight` [C 1 W] without its middle axis).
    """
    op = "causal_conv1d"
    check_shapes(op, x, weight, bias, initial_state, segment_ids, mask)
    check_options(op, activation=activation, implementation=implementation)
    return _apply(
        x, weight, bias, initial_state, segment_ids, mask, activation=activation, implementation=implementation
    )


@compiled("activation", "implementation")
def _apply(x, weight, bias, initial_state, segment_ids, mask, *, activation, implementation):
    lead, (length, channels), past = x.shape[:-2], x.shape[-2:], weight.shape[1] - 1
    accumulate = accumulator(x.dtype)

    def flat(a: Any, axes: int) -> Any:
        # not -1: a state of width 1 has no elements to count
        return None if a is None else a.reshape(math.prod(lead), *a.shape[a.ndim - axes :])

    x, initial_state, boundary, mask = (
        flat(x, 2), flat(initial_state, 2), flat(boundaries(segment_ids, mask), 1), flat(mask, 1),
    )  # fmt: skip
    weight, bias = weight.astype(accumulate), None if bias is None else bias.astype(accumulate)
    x, weight, bias, initial_state, boundary, mask = alike((x, weight, bias, initial_state, boundary, mask))
    if implementation == "reference":
        start = jnp.zeros_like(x, shape=(x.shape[0], past, channels)) if initial_state is None else initial_state
        y, state = reference(x, weight, bias, start, boundary, mask, activation)
    else:
        arrays = (x, weight, bias, initial_state, boundary, mask)
        if implementation == "chunked":
            y: Any = chunked(*arrays, activation)
        else:
            against = None if implementation == "xla" else reason_against(x, weight)
            require(
                implementation != "pallas" or against is None,
                f"causal_conv1d: implementation='pallas' cannot take these inputs: {against}; use 'auto' or 'xla'",
            )
            y = conv(*arrays, activation, "xla" if against else implementation)
        state = final_state(x, initial_state, boundary, mask, past)
    return y.reshape(*lead, length, channels), state.reshape(*lead, past, channels)


def causal_conv1d_step(
    x: Float[Array, "*B C"],
    weight: Float[Array, "C W"],
    bias: Float[Array, " C"] | None = None,
    *,
    initial_state: Float[Array, "*B W-1 C"] | None = None,
    activation: Literal["silu"] | None = None,
) -> tuple[Float[Array, "*B C"], Float[Array, "*B W-1 C"]]:
    """One token of `causal_conv1d`, for decoding: the same arguments without T; every derivative exists.

    Returns: `(y, new_state)`, both in x's dtype.

    Raises: ValueError as `causal_conv1d`.
    """
    op = "causal_conv1d_step"
    check_shapes(op, x, weight, bias, initial_state, axis_t="")
    check_options(op, activation=activation)
    past, accumulate = weight.shape[1] - 1, accumulator(x.dtype)
    if initial_state is None:
        initial_state = jnp.zeros((*x.shape[:-1], past, x.shape[-1]), x.dtype)
    window = jnp.concatenate([initial_state, x[..., None, :]], axis=-2)
    expand = (None,) * (x.ndim - 1)
    taps = weight.astype(accumulate).T[:, *expand]
    total: Any = sum(window[..., w, :].astype(accumulate) * taps[w] for w in range(past + 1))
    if bias is not None:
        total = total + bias.astype(accumulate)[expand]
    return activate(total, activation).astype(x.dtype), window[..., 1:, :]
