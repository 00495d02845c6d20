"""The two gates of the delta rule, from their projections."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ._dtypes import accumulator
from ._validate import describe, require, require_array, shapes


def check_gates(op: str, a, b, A_log, dt_bias) -> None:
    """a and b must have one shape [... H], A_log and dt_bias [H]."""
    received = f"received {shapes(a=a, b=b, A_log=A_log, dt_bias=dt_bias)}"
    for name, x in (("a", a), ("b", b)):
        require_array(op, name, x, "*B H")
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require_array(op, name, x, "H")
    require(
        a.shape == b.shape,
        f"{op}: `a` and `b` must have one shape, one value a token and value head; {received}",
    )
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        require(
            x.shape == a.shape[-1:],
            f"{op}: `{name}` must be [H] = [{a.shape[-1]}], one value a value head, the last axis of `a`, but it is "
            f"{describe(x)}; {received}",
        )


def decay_and_beta(
    a: Float[Array, "*B H"],
    b: Float[Array, "*B H"],
    A_log: Float[Array, " H"],
    dt_bias: Float[Array, " H"],
    *,
    strict_hf_rounding: bool = False,
) -> tuple[Float[Array, "*B H"], Float[Array, "*B H"]]:
    r"""Log-decay and writing rate of each token and value head:

        g = −exp(A_log) · log(1 + exp(a + dt_bias))  ≤ 0            β = 1 / (1 + exp(−b))  in (0, 1)

    Arguments:
        a, b: projections of the tokens, any leading axes and float dtype.
        A_log: natural logarithm of the decay rate A; dt_bias: the offset of the time step. Kept in float32: eight
            bits of A_log change A by 0.3 % on average, by up to 1.6 %.
        strict_hf_rounding: round β to b's dtype, as Hugging Face's bfloat16 models do.

    Returns: `(g, beta)`, in float32 (float64 for float64 projections).

    Raises: ValueError where the shapes don't fit or an argument isn't floating.

    Source: Gu, Dao, "Mamba" (the time step); arXiv:2412.06464; Qwen3-Next.
    """
    op = "decay_and_beta"
    check_gates(op, a, b, A_log, dt_bias)
    accumulate = accumulator(a.dtype)
    rate, offset = (x.astype(accumulate)[(None,) * (a.ndim - 1)] for x in (A_log, dt_bias))
    g = _log_decay(rate, a.astype(accumulate) + offset)
    beta = jax.nn.sigmoid(b.astype(accumulator(b.dtype)))
    if strict_hf_rounding:
        beta = beta.astype(b.dtype)
    return g, beta.astype(accumulate)


def _log_decay(rate: Float[Array, "... H"], x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    """−exp(rate) · softplus(x). Where a factor leaves the range of float32 but the product need not, the sum of the
    logarithms is exponentiated instead."""
    large, small = rate > 80, x < -60
    extreme = large | small
    # each branch gets arguments at which its derivative is finite: 0 · inf would be NaN
    within = jnp.where(small, 0, x)
    step = jax.nn.softplus(within)
    plain = jnp.exp(jnp.where(large, 0, rate)) * step
    logarithm = rate + jnp.where(small, x, jnp.log(jnp.where(extreme & ~small, step, 1)))
    return -jnp.where(extreme, jnp.exp(jnp.where(extreme, logarithm, 0)), plain)
