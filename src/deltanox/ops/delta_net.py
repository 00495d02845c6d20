"""The gated DeltaNet mixer's core on the projections' merged arrays: convolution, gates and delta rule."""

from typing import Any, Literal

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from .._types import Implementation, Mask, Number, Precision, SegmentIds, State
from ._dtypes import accumulator
from ._validate import describe, require, require_array, shapes
from .causal_conv import causal_conv1d, causal_conv1d_step
from .causal_conv.inputs import check_options as check_conv_options, check_state, check_tokens, check_weight
from .causal_conv.shifted import activate
from .delta_rule import Residuals, gated_delta_step
from .delta_rule.inputs import check_options
from .delta_rule.op import apply
from .delta_rule.vjp import split_merged
from .gates import check_gates, decay_and_beta


def check_shapes(
    op, qkv, a, b, A_log, dt_bias, conv_weight, conv_bias, num_key_heads, key_head_size, conv_state, initial_state,
    segment_ids=None, mask=None, *, axis_t: str = "T ",
) -> int:  # fmt: skip
    """Raise ValueError unless shapes and dtypes fit together; the value head size. `axis_t` is "" for one token."""
    arrays = shapes(
        qkv=qkv, a=a, b=b, A_log=A_log, dt_bias=dt_bias, conv_weight=conv_weight, conv_bias=conv_bias,
        conv_state=conv_state, initial_state=initial_state, segment_ids=segment_ids, mask=mask,
    )  # fmt: skip
    received = f"received {arrays}, num_key_heads={num_key_heads!r}, key_head_size={key_head_size!r}"
    for name, size in (("num_key_heads", num_key_heads), ("key_head_size", key_head_size)):
        require(
            isinstance(size, int) and not isinstance(size, bool) and size >= 1,
            f"{op}: `{name}` must be an integer of at least 1, but it is {size!r}",
        )
    require_array(op, "qkv", qkv, f"*B {axis_t}2hK+HV")
    check_gates(op, a, b, A_log, dt_bias)
    tokens, (heads,) = qkv.shape[:-1], A_log.shape
    letters = "*B, T" if axis_t else "*B"
    require(
        a.shape == (*tokens, heads),
        f"{op}: `a` and `b` must be [{letters}, H] = {[*tokens, heads]}, the axes [{letters}] of `qkv`, but they are "
        f"{describe(a)}; {received}: the order is tokens before heads",
    )
    for name, size in (("T", tokens[-1] if axis_t else 1), ("H", heads)):
        require(size >= 1, f"{op}: the axis {name} must not be empty; {received}")
    require(
        heads % num_key_heads == 0,
        f"{op}: the value heads H = {heads} (the last axis of `a`) must be a multiple of the key heads num_key_heads "
        f"= {num_key_heads}; {received}: value head i reads key head i // (H / h)",
    )
    channels, keys = qkv.shape[-1], 2 * num_key_heads * key_head_size
    require(
        channels > keys and (channels - keys) % heads == 0,
        f"{op}: the last axis of `qkv` must be 2hK + HV, the merged queries, keys and values: 2·h·K = "
        f"2·{num_key_heads}·{key_head_size} = {keys} and a multiple V of H = {heads}, as {keys} + {heads}·V, but it is "
        f"{channels}; {received}: check num_key_heads, key_head_size and that z is not merged into it",
    )
    value_size = (channels - keys) // heads
    lead = tokens[:-1] if axis_t else tokens
    past = 0
    if conv_weight is not None:
        check_weight(op, conv_weight, conv_bias, channels, received, names=("conv_weight", "conv_bias"))
        past = conv_weight.shape[1] - 1
    else:
        require(
            conv_bias is None,
            f"{op}: `conv_bias` needs a `conv_weight`, which is None; {received}: add the bias to qkv instead",
        )
    check_state(op, conv_state, lead, past, channels, qkv.dtype, received, name="conv_state")
    if initial_state is not None:
        require_array(op, "initial_state", initial_state, "*B H K V")
        wanted = (*lead, heads, key_head_size, value_size)
        require(
            initial_state.shape == wanted,
            f"{op}: `initial_state` must be [*B, H, K, V] = {list(wanted)}, but it is {describe(initial_state)}; "
            f"{received}: keys come before values, one state a batch row and value head",
        )
    check_tokens(op, tokens, received, segment_ids=segment_ids, mask=mask)
    return value_size


def gated_delta_net(
    qkv: Float[Array, "*B T C"],
    a: Float[Array, "*B T H"],
    b: Float[Array, "*B T H"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, " H"],
    conv_weight: Float[Array, "C W"] | None,
    conv_bias: Float[Array, " C"] | None = None,
    *,
    num_key_heads: int,
    key_head_size: int,
    conv_state: Float[Array, "*B _ C"] | None = None,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    mask: Mask | None = None,
    activation: Literal["silu"] | None = "silu",
    scale: Number | None = None,
    l2norm_eps: Number = 1e-6,
    chunk_size: int = 64,
    implementation: Implementation = "auto",
    precision: Precision | None = None,
    state_dtype: Any = jnp.float32,
    decay_dtype: Any = jnp.float32,
    residuals: Residuals = Residuals(),  # noqa: B008 (frozen)
    strict_hf_rounding: bool = False,
) -> tuple[Float[Array, "*B T HV"], Float[Array, "*B _ C"], State]:
    r"""The gated DeltaNet mixer between its projections:

        qkv ← silu(causal_conv1d(qkv, conv_weight, conv_bias))               over all C = 2hK + HV channels
        q, k, v = split(qkv)                                                 [h K], [h K], [H V]
        g = −exp(A_log) softplus(a + dt_bias),   β = sigmoid(b)              in float32
        out = gated_delta_rule(q / ‖q‖, k / ‖k‖, v, g, β)                    heads merged again

    Heads stay merged in the last axis, outside and in the convolution, so that nothing is transposed in memory.

    Arguments:
        qkv: the merged projection, in the order [queries of all h key heads | keys of all h | values of all H heads].
        a, b: projections for decay and rate, one value a value head.
        A_log, dt_bias: see `decay_and_beta`; float32.
        conv_weight: the convolution's taps, see `causal_conv1d`; None leaves convolution and activation out.
        conv_bias: its bias, or None.
        num_key_heads: h; key_head_size: K. H comes from `a`, and V from the width of `qkv`.
        conv_state: the W − 1 rows of qkv before the first token [*B W-1 C], in qkv's dtype; None is zeros.
        initial_state: the recurrent state [*B H K V]; None is zeros. Both states belong to the first segment.
        segment_ids: packed documents; neither convolution nor recurrence crosses a boundary.
        mask: False at padding; outputs there are zero, and everything else is as if the row were not padded (see
            `causal_conv1d` and `gated_delta_rule`).
        activation: of the convolution: "silu", or None.
        scale, l2norm_eps, chunk_size, implementation, precision, state_dtype, decay_dtype, residuals: as in
            `gated_delta_rule`;
            "implementation" chooses the convolution's engine as well, so that "chunked" has every derivative.
        strict_hf_rounding: round as Hugging Face's bfloat16 models do: the convolution before its activation, and β.
            No difference in float32.

    Returns: `(out, conv_state, final_state)`: out [*B T HV] in qkv's dtype; the convolution's state [*B W-1 C] in
        qkv's dtype (empty without a convolution) and the recurrent state [*B H K V] in float32 (float64 for float64
        inputs), both after the last real token.

    Raises: ValueError with the argument, the shapes received and the remedy; NotImplementedError as `gated_delta_rule`.

    Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464; Qwen3-Next and Qwen3.5.
    """
    op = "gated_delta_net"
    value_size = check_shapes(
        op, qkv, a, b, A_log, dt_bias, conv_weight, conv_bias, num_key_heads, key_head_size, conv_state, initial_state,
        segment_ids, mask,
    )  # fmt: skip
    check_options(
        op, chunk_size=chunk_size, implementation=implementation, precision=precision, state_dtype=state_dtype,
        decay_dtype=decay_dtype, residuals=residuals, scale=scale, l2norm_eps=l2norm_eps,
    )  # fmt: skip
    check_conv_options(op, activation=activation, implementation="auto" if conv_weight is None else implementation)
    if mask is not None:
        # before the gates: their derivatives would turn a masked NaN into one of A_log and dt_bias
        a, b = (jnp.where(mask[..., None], x, 0) for x in (a, b))
    again = residuals.qkv == "recompute"  # the caller has convolved already
    qkv = qkv if again else checkpoint_name(qkv, "gdn_qkv")
    if conv_weight is None:
        conv_state = jnp.zeros((*qkv.shape[:-2], 0, qkv.shape[-1]), qkv.dtype)
    else:
        qkv, conv_state = convolve(
            qkv, conv_weight, conv_bias, conv_state, segment_ids, mask, activation=activation,
            implementation=implementation, strict_hf_rounding=strict_hf_rounding,
        )  # fmt: skip
    if conv_weight is not None or again:
        qkv = checkpoint_name(qkv, "gdn_conv_out")
    gates = decay_and_beta(a, b, A_log, dt_bias, strict_hf_rounding=strict_hf_rounding)
    g, beta = (checkpoint_name(x, "gdn_gates") for x in gates)
    out, state = apply(
        op, (qkv,), g, beta, initial_state, segment_ids, mask, key_heads=num_key_heads, key_size=key_head_size,
        value_size=value_size, scale=scale, l2norm_eps=l2norm_eps, chunk_size=chunk_size,
        implementation=implementation, precision=precision, state_dtype=state_dtype, decay_dtype=decay_dtype,
        residuals=residuals, overwrite=conv_weight is not None or again,
    )  # fmt: skip
    return out.reshape(*out.shape[:-2], -1), conv_state, state


def convolve(
    qkv, conv_weight, conv_bias, conv_state, segment_ids, mask, *, activation, implementation, strict_hf_rounding
):
    """The convolution of `gated_delta_net`, with its roundings: `(qkv, conv_state)`."""
    qkv, conv_state = causal_conv1d(
        qkv, conv_weight, conv_bias, initial_state=conv_state, segment_ids=segment_ids, mask=mask,
        activation=None if strict_hf_rounding else activation, implementation=implementation,
    )  # fmt: skip
    return _round_then_activate(qkv, activation) if strict_hf_rounding else qkv, conv_state


def gated_delta_net_step(
    qkv: Float[Array, "*B C"],
    a: Float[Array, "*B H"],
    b: Float[Array, "*B H"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, " H"],
    conv_weight: Float[Array, "C W"] | None,
    conv_bias: Float[Array, " C"] | None = None,
    *,
    num_key_heads: int,
    key_head_size: int,
    conv_state: Float[Array, "*B _ C"] | None = None,
    initial_state: State | None = None,
    activation: Literal["silu"] | None = "silu",
    scale: Number | None = None,
    l2norm_eps: Number = 1e-6,
    strict_hf_rounding: bool = False,
) -> tuple[Float[Array, "*B HV"], Float[Array, "*B _ C"], State]:
    """One token of `gated_delta_net`, for decoding: the same arguments without T; every derivative exists.

    Returns: `(out, conv_state, new_state)` as `gated_delta_net`.

    Raises: ValueError as `gated_delta_net`.
    """
    op = "gated_delta_net_step"
    check_shapes(
        op, qkv, a, b, A_log, dt_bias, conv_weight, conv_bias, num_key_heads, key_head_size, conv_state, initial_state,
        axis_t="",
    )  # fmt: skip
    check_conv_options(op, activation=activation)
    if conv_weight is None:
        conv_state = jnp.zeros((*qkv.shape[:-1], 0, qkv.shape[-1]), qkv.dtype)
    else:
        qkv, conv_state = causal_conv1d_step(
            qkv, conv_weight, conv_bias, initial_state=conv_state, activation=None if strict_hf_rounding else activation
        )
        if strict_hf_rounding:
            qkv = _round_then_activate(qkv, activation)
    q, k, v = split_merged(qkv, num_key_heads, key_head_size, a.shape[-1])
    g, beta = decay_and_beta(a, b, A_log, dt_bias, strict_hf_rounding=strict_hf_rounding)
    out, state = gated_delta_step(
        q, k, v, g, beta, initial_state=initial_state, scale=scale, use_qk_l2norm=True, l2norm_eps=l2norm_eps
    )
    return out.reshape(*out.shape[:-2], -1), conv_state, state


def _round_then_activate(x, activation: str | None):
    """The activation of an array that was rounded to its dtype already, rounded once more."""
    return activate(x.astype(accumulator(x.dtype)), activation).astype(x.dtype)
