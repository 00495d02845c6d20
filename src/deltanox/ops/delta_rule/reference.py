r"""The gated delta rule, token by token: the definition that every other implementation is held against.

For a value head with state S [K, V], the log-decay g_t ≤ 0 and the rate β_t:

    S ← exp(g_t) S                       forget
    e = v_t − Sᵀ k_t                     what the state does not know yet about key k_t
    S ← S + k_t (β_t e)ᵀ                 write
    o_t = Sᵀ (scale · q_t)               read, after the write

Value head i reads key head i // (H / h). Where a segment begins, S is zero before the token; a masked token
leaves S as it is. With `use_qk_l2norm`, x is x · rsqrt(Σ x² + eps) for q and k.

Source: Yang, Kautz, Hatamizadeh, "Gated Delta Networks" (arXiv:2412.06464); order of decay and error as in Qwen3-Next.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._dtypes import inverse_root
from .._float64 import in_float64

BLOCK = 32  # tokens whose states are computed again in the backward pass, instead of being kept


def l2norm(x: Float[Array, "*S"], eps: float) -> Float[Array, "*S"]:
    """x · rsqrt(Σ x² + eps) over the last axis; zero for zeros, also with eps = 0."""
    return x * inverse_root(jnp.sum(x * x, axis=-1, keepdims=True), eps)


def step(
    state: Float[Array, "B H K V"],
    q: Float[Array, "B h K"],
    k: Float[Array, "B h K"],
    v: Float[Array, "B H V"],
    g: Float[Array, "B H"],
    beta: Float[Array, "B H"],
    scale: float,
) -> tuple[Float[Array, "B H K V"], Float[Array, "B H V"]]:
    """One token. All arrays in one dtype, q and k already normalised. Returns the new state and the output."""
    heads, groups = v.shape[1], q.shape[1]
    # keys before states: the products then read a state as it lies in memory
    q, k = (jnp.repeat(x, heads // groups, axis=1) for x in (q, k))
    state = jnp.exp(g)[..., None, None] * state
    error = v - jnp.einsum("bhk,bhkv->bhv", k, state, precision="highest")
    state = state + k[..., None] * (beta[..., None] * error)[:, :, None]
    return state, jnp.einsum("bhk,bhkv->bhv", q * scale, state, precision="highest")


def recurrence(
    q: Float[Array, "B T h K"],
    k: Float[Array, "B T h K"],
    v: Float[Array, "B T H V"],
    g: Float[Array, "B T H"],
    beta: Float[Array, "B T H"],
    initial_state: Float[Array, "B H K V"],
    boundary: Bool[Array, "B T"] | None,
    mask: Bool[Array, "B T"] | None,
    *,
    scale: float,
    l2norm_eps: float | None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """The recurrence over all tokens, in the dtype of its arrays. `l2norm_eps` None leaves q and k as they are."""
    batch, length = q.shape[:2]
    boundary = jnp.zeros((batch, length), bool) if boundary is None else boundary
    mask = jnp.ones((batch, length), bool) if mask is None else mask

    def blocks(x):
        x = jnp.pad(x, [(0, 0), (0, -length % BLOCK)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x, 1, 0).reshape(-1, BLOCK, x.shape[0], *x.shape[2:])

    def token(state, inputs):
        q, k, v, g, beta, begins, real = inputs
        here = real[:, None, None]
        q, k, v = (jnp.where(here, x, 0) for x in (q, k, v))  # a masked value, NaN included, never meets the state
        g, beta = (jnp.where(here[..., 0], x, 0) for x in (g, beta))
        if l2norm_eps is not None:
            q, k = l2norm(q, l2norm_eps), l2norm(k, l2norm_eps)
        state = jnp.where(begins[:, None, None, None], 0, state)
        return step(state, q, k, v, g, beta, scale)

    @jax.checkpoint
    def block(state, inputs):
        return jax.lax.scan(token, state, inputs)

    state, out = jax.lax.scan(block, initial_state, tuple(blocks(x) for x in (q, k, v, g, beta, boundary, mask)))
    out = jnp.moveaxis(out.reshape(-1, *out.shape[2:])[:length], 0, 1)
    return out, state


def reference(q, k, v, g, beta, initial_state, boundary, mask, *, scale, l2norm_eps):
    """`recurrence` in float64, whatever the dtype of its arrays and JAX's x64 switch (`in_float64`). Slow: for checks.

    Results are cast to the dtypes of `v` and of `initial_state`.
    """
    return _reference((q, k, v, g, beta, initial_state), (boundary, mask), (scale, l2norm_eps))


@in_float64
def _reference(floats, rest, options):
    (boundary, mask), (scale, l2norm_eps) = rest, options
    wide = [x.astype(jnp.float64) for x in floats]
    out, state = recurrence(*wide, boundary, mask, scale=scale, l2norm_eps=l2norm_eps)
    return out.astype(floats[2].dtype), state.astype(floats[5].dtype)
