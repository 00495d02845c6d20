"""The public op: shapes, packing and dispatch. The mathematics is in `reference.py`, the chunked form in
`chunked.py`."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..._types import Implementation, Mask, Number, Precision, SegmentIds, State
from .._compiled import compiled
from .._dtypes import accumulator
from .._manual import alike
from .._segments import boundaries
from .chunked import Options, chunked
from .inputs import check_numbers, check_options, check_shapes
from .reference import l2norm, reference, step
from .residuals import Residuals
from .tpu import Inputs, unsupported
from .vjp import rule, unmerged


def gated_delta_rule(
    q: Float[Array, "*B T h K"],
    k: Float[Array, "*B T h K"],
    v: Float[Array, "*B T H V"],
    g: Float[Array, "*B T H"] | None,
    beta: Float[Array, "*B T H"],
    *,
    initial_state: State | None = None,
    segment_ids: SegmentIds | None = None,
    mask: Mask | None = None,
    scale: Number | None = None,
    use_qk_l2norm: bool = False,
    l2norm_eps: Number = 1e-6,
    chunk_size: int = 64,
    implementation: Implementation = "auto",
    precision: Precision | None = None,
    state_dtype: Any = jnp.float32,
    decay_dtype: Any = jnp.float32,
    residuals: Residuals = Residuals(),  # noqa: B008 (frozen)
) -> tuple[Float[Array, "*B T H V"], State]:
    r"""The gated delta rule over a sequence.

    For each value head, with the state S [K, V] and S_0 = `initial_state`:

        S_t = (I − β_t k_t k_tᵀ) exp(g_t) S_{t−1} + β_t k_t v_tᵀ          o_t = scale · S_tᵀ q_t

    Arguments:
        q, k: queries and keys of h key heads; any float dtype, the same for q, k and v.
        v: values of H value heads, H a multiple of h: value head i reads key head i // (H / h), and q and k are not
            repeated.
        g: log-decay, natural logarithm, ≤ 0. None is no decay. A value below −104 (where exp is zero in float32), −inf
            included, is an exact reset.
        beta: writing rate in [0, 1]; up to 2 is stable for keys of norm 1.
        initial_state: the state before the first token, float32; None is zeros. It belongs to the first segment.
        segment_ids: documents packed in a row: any change between neighbours is a boundary, and tokens on its two
            sides never meet.
        mask: False at padding, left, right or between. A masked token leaves the state as it is, its output is zero,
            its values
            (NaN included) and its segment id are not looked at.
        scale: factor of the output, by default K^-1/2.
        use_qk_l2norm: normalise q and k in float32, x · rsqrt(Σ x² + l2norm_eps), in both directions. Without it,
            keys of norm 1 are expected.
        chunk_size: tokens a chunk, a power of two.
        implementation: see below.
        precision: of the matrix products on an accelerator ("default": one bfloat16 or TF32 pass, "high": three,
            "highest": float32).
            By default "highest" for float32 inputs and "default" below. XLA's code inverts inside a chunk in "highest"
            always; the kernels' "high" is three passes everywhere.
        state_dtype: dtype to which states are rounded between chunks, and in which they are kept for the backward pass;
            all else of the recurrence is float32.
        decay_dtype: dtype to which g and beta are rounded and in which they are kept; sums of g are float32.
        residuals: what the forward pass keeps for the backward pass of "xla" and "pallas".

    Returns: `(out, final_state)`: out in v's dtype; final_state, after the last segment's last token, in float32
    (float64 for
        float64 inputs).

    | implementation | what it is | derivatives |
    |---|---|---|
    | "xla" | chunks, with the hand-derived backward; states kept every n chunks | reverse mode, once |
    | "chunked" | the same forward, differentiated by JAX | forward and reverse mode, any number of times |
    | "reference" | the recurrence above, token by token, in float64 | with JAX's x64 on: all; off: reverse mode, once |
    | "pallas" | TPU kernels, forward and backward; interpreted on a CPU, an error elsewhere | reverse mode, once |
    | "auto" | the kernels where a TPU is compiled for and they can take the inputs, else "xla" | reverse mode, once |

    The kernels take float32 and bfloat16, head sizes of 64, 128 and 256 and any numbers of heads, and keep states at
    multiples of 128 tokens (`chunk_size` × `residuals.states_every`); their own chunk is 128 tokens, and `chunk_size`
    must be that where T^-1 is kept. Inside `jax.shard_map` over batch and heads everything works, but for "pallas" on a
    CPU, which needs `check_vma=False` there: JAX's interpreter cannot check the kernels' loops.

    Raises: ValueError with the argument, the shapes received and the remedy, for all that shapes and dtypes can tell;
        `check_inputs` looks at values; for "pallas" also with what the kernels cannot take. NotImplementedError at a
        second derivative of "xla" and "pallas" (and of "reference" with x64 off), and where "pallas" is compiled for
        anything but a TPU or a CPU.

    Source: Yang, Kautz, Hatamizadeh, arXiv:2412.06464; as in Qwen3-Next and Qwen3.5.
    """
    name = "gated_delta_rule"
    check_shapes(name, q, k, v, g, beta, initial_state, segment_ids, mask)
    check_options(
        name,
        chunk_size=chunk_size,
        implementation=implementation,
        precision=precision,
        state_dtype=state_dtype,
        decay_dtype=decay_dtype,
        residuals=residuals,
        scale=scale,
        l2norm_eps=l2norm_eps,
    )
    return apply(
        name, (q, k, v), g, beta, initial_state, segment_ids, mask, key_heads=q.shape[-2], key_size=q.shape[-1],
        value_size=v.shape[-1], scale=scale, l2norm_eps=l2norm_eps if use_qk_l2norm else None, chunk_size=chunk_size,
        implementation=implementation, precision=precision, state_dtype=state_dtype, decay_dtype=decay_dtype,
        residuals=residuals,
    )  # fmt: skip


@compiled(
    "op", "key_heads", "key_size", "value_size", "scale", "l2norm_eps", "chunk_size", "implementation", "precision",
    "state_dtype", "decay_dtype", "residuals", "overwrite",
)  # fmt: skip
def apply(
    op: str, arrays: tuple[Array, ...], g, beta, initial_state, segment_ids, mask, *, key_heads: int, key_size: int,
    value_size: int, scale, l2norm_eps: float | None, chunk_size, implementation, precision, state_dtype, decay_dtype,
    residuals, overwrite: bool = False,
) -> tuple[Float[Array, "*B T H V"], State]:  # fmt: skip
    """The rule on checked arguments: `arrays` are q, k, v, or the merged array [*B T 2hK+HV], which is nobody else's
    with `overwrite`."""
    *lead, length, heads = beta.shape
    dtype = arrays[0].dtype
    accumulate = accumulator(dtype)

    def flat(x, axes) -> Any:
        return None if x is None else x.reshape(-1, *x.shape[x.ndim - axes :])

    # float64 stays float64
    gate_dtype = accumulate if decay_dtype == jnp.float32 else jnp.dtype(decay_dtype)
    g = jnp.zeros(beta.shape, gate_dtype) if g is None else g.astype(gate_dtype)
    if initial_state is None:
        initial_state = jnp.zeros((*lead, heads, key_size, value_size), accumulate)
    inputs = Inputs(
        tuple(flat(x, x.ndim - len(lead)) for x in arrays),
        *(flat(x, 2) for x in (g, beta.astype(gate_dtype))),
        *(flat(x, 1) for x in (boundaries(segment_ids, mask), mask)),
    )
    inputs, state = alike((inputs, flat(initial_state.astype(accumulate), 3)))
    factor = key_size**-0.5 if scale is None else float(scale)
    # q's gradient divides by the factor: one of no ordinary size is multiplied to the output instead
    ordinary = 2.0**-60 <= abs(factor) <= 2.0**60
    factor, outer = (factor, None) if ordinary else (1.0, factor)
    l2norm_eps = None if l2norm_eps is None else float(l2norm_eps)
    if precision is None:
        precision = "highest" if dtype in (jnp.float32, jnp.float64) else "default"
    options = Options(
        factor, l2norm_eps, chunk_size, precision, jnp.dtype(state_dtype), residuals, key_heads, key_size, "xla",
        overwrite,
    )  # fmt: skip
    if implementation in ("reference", "chunked"):
        tokens = unmerged(inputs, heads, options)
        arguments = (*tokens[:5], state, *tokens[5:])
        if implementation == "chunked":
            out, state = chunked(*arguments, options)
        else:
            out, state = reference(*arguments, scale=factor, l2norm_eps=l2norm_eps)
    else:
        values: Any = rule(choose(op, implementation, inputs, options, value_size), inputs, state)
        out, state = values
    if outer is not None:
        out = (out.astype(accumulate) * jnp.asarray(outer, accumulate)).astype(out.dtype)
    return out.reshape(*lead, length, heads, value_size), state.reshape(*lead, heads, key_size, value_size)


def choose(op: str, implementation: str, inputs: Inputs, options: Options, value_size: int) -> Options:
    """The options with the engine that `implementation` asks for: "auto" leaves out kernels that can't take the
    inputs, "pallas" says why they can't."""
    reason = unsupported(inputs, options, value_size)
    if implementation == "pallas" and reason is not None:
        raise ValueError(f"{op}: implementation='pallas' cannot take these inputs: {reason}; or use 'auto' or 'xla'")
    engine = "xla" if implementation == "auto" and reason is not None else implementation
    return options._replace(engine=engine)


def gated_delta_step(
    q: Float[Array, "*B h K"],
    k: Float[Array, "*B h K"],
    v: Float[Array, "*B H V"],
    g: Float[Array, "*B H"] | None,
    beta: Float[Array, "*B H"],
    *,
    initial_state: State | None = None,
    scale: Number | None = None,
    use_qk_l2norm: bool = False,
    l2norm_eps: Number = 1e-6,
) -> tuple[Float[Array, "*B H V"], State]:
    """One token of `gated_delta_rule`, for decoding: the same arguments without T; every derivative exists.

    Returns: `(out, new_state)`: out in v's dtype, the state in float32 (float64 for float64 inputs).

    Raises: ValueError as `gated_delta_rule`.
    """
    check_shapes("gated_delta_step", q, k, v, g, beta, initial_state, axis_t="")
    check_numbers("gated_delta_step", scale=scale, l2norm_eps=l2norm_eps)
    lead, key_size, heads, value_size = q.shape[:-2], q.shape[-1], *v.shape[-2:]
    accumulate = accumulator(v.dtype)
    g = jnp.zeros(beta.shape, accumulate) if g is None else g
    if initial_state is None:
        initial_state = jnp.zeros((*lead, heads, key_size, value_size), accumulate)
    wide = [x.reshape(-1, *x.shape[len(lead) :]).astype(accumulate) for x in (initial_state, q, k, v, g, beta)]
    if use_qk_l2norm:
        wide[1:3] = (l2norm(x, float(l2norm_eps)) for x in wide[1:3])
    state, out = step(*wide, key_size**-0.5 if scale is None else float(scale))
    return out.astype(v.dtype).reshape(v.shape), state.reshape(initial_state.shape)
