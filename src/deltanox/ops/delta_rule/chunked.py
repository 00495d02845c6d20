r"""The chunked form of the gated delta rule: matrix products over C tokens instead of a step a token.

For one value head and a chunk of C tokens, with S [K, V] the state before it and G_i − G_j the sum of g over (j, i]:

    Γ_ij = exp(G_i − G_j)   c_i = exp(G_i − G_0)   d_i = exp(G_C − G_i)      within one segment, else 0
    M = strict_lower(β_i (k_i·k_j) Γ_ij)           T = (I + M)^-1
    A = lower(scale (q_i·k_j) Γ_ij)
    N = T diag(β) (V − diag(c) K S)                the values that are new to the state
    O = diag(c) scale Q S + A N
    S' = c_C S + Kᵀ diag(d) N

Where a segment begins, or a decay is below −104, everything is forgotten: such a token is a reset. It is cut by the
masks of Γ, c and d, and its g is
left out of the sums, which then hold mild numbers only.

Tokens come in groups of n chunks. Within a group, what depends on the tokens alone (norms, K Kᵀ, Q Kᵀ, Γ, T) is
computed for all chunks at
once; then a scan over its chunks carries the state. An outer scan runs over the groups: the working set stays small,
and the backward
pass needs the states between groups only.

Layout inside: [n, B, h, C, ...] for what belongs to a key head, r = H / h value heads beside each other in the
feature axes, so that
Q, K and their products are computed once a key head, and a product with the state is one matrix product for all r.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from .._dtypes import inverse_root
from .residuals import Residuals

RESET = -104.0  # exp of it is zero in float32
BLOCK = 16  # rows of the diagonal blocks that start the inverse


class Options(NamedTuple):
    """What is compiled into the op. Hashable."""

    scale: float
    l2norm_eps: float | None
    chunk_size: int
    precision: str
    state_dtype: jnp.dtype
    residuals: Residuals
    key_heads: int
    key_size: int
    engine: Literal["auto", "xla", "pallas"]
    overwrite: bool = False  # the merged array is nobody else's: its cotangent may take its place

    @property
    def keep_t(self) -> bool:
        return self.residuals.t_inv == "save"


class Decay(NamedTuple):
    """Decays within chunks, `r` value heads a key head. All factors are at most 1, zero across a reset."""

    pair: Float[Array, "n B h r C C"]  # Γ_ij for j < i, zero elsewhere
    start: Float[Array, "n B h C r"]  # c_i: from the state before the chunk to token i
    end: Float[Array, "n B h C r"]  # d_i: from token i to the state after the chunk
    whole: Float[Array, "n B h r"]  # c_C: from the state before the chunk to the state after it
    reset: Bool[Array, "n B h r C"]


class Group(NamedTuple):
    """What the tokens of n chunks give, before any state is known."""

    kq: Float[Array, "n B h 2C K"]  # normalised keys above scaled, normalised queries
    kq_t: Float[Array, "n B h K 2C"]
    v: Float[Array, "n B h C r V"]
    beta: Float[Array, "n B h C r"]
    decay: Decay
    gram: Float[Array, "n B h C C"]  # k_i·k_j
    read: Float[Array, "n B h C C"]  # scale q_i·k_j
    a: Float[Array, "n B h r C C"]
    norms: tuple[Float[Array, "n B h C 1"], Float[Array, "n B h C 1"]] | None  # rsqrt(Σ x² + eps) of k and q


class Plan(NamedTuple):
    """Sizes of a call: `groups` × `chunks` × `size` tokens, of which the first `length` are given."""

    length: int
    groups: int
    chunks: int
    size: int


def plan(length: int, options: Options) -> Plan:
    """Groups of `states_every` chunks; a short sequence gets one group of the chunks it has, and a smaller chunk, but
    where T^-1 has to fit the kernels' record."""
    size = options.chunk_size
    if not (options.keep_t and options.engine == "auto"):
        size = min(size, max(BLOCK, 1 << (length - 1).bit_length()))
    total = -(-length // size)
    chunks = min(options.residuals.states_every, total)
    return Plan(length, -(-total // chunks), chunks, size)


def split(tokens, p: Plan):
    """Pad the tokens [B, T, ...] with zeros and cut them into groups and chunks [G, B, n, C, ...], in every array of
    a tree.

    Zero keys, rates and decays leave the state as it is.
    """

    def cut(x):
        pad = p.groups * p.chunks * p.size - p.length
        if pad:
            x = jnp.pad(x, [(0, 0), (0, pad)] + [(0, 0)] * (x.ndim - 2))
        return jnp.moveaxis(x.reshape(x.shape[0], p.groups, p.chunks, p.size, *x.shape[2:]), 1, 0)

    return jax.tree.map(cut, tokens)


def join(x: Float[Array, "G B n C ..."], p: Plan) -> Float[Array, "B T ..."]:
    """The inverse of `split`."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[4:])[:, : p.length]


def matmul(x, y, precision) -> Array:
    """Product of the last two axes, batched over the others."""
    return jax.lax.dot_general(
        x,
        y,
        (((x.ndim - 1,), (y.ndim - 2,)), (tuple(range(x.ndim - 2)), tuple(range(y.ndim - 2)))),
        precision=precision,
    )


def matmul_t(x, y, precision) -> Array:
    """x yᵀ over the last two axes, batched over the others."""
    batch = tuple(range(x.ndim - 2))
    return jax.lax.dot_general(x, y, (((x.ndim - 1,), (y.ndim - 1,)), (batch, batch)), precision=precision)


def transposed(x: Float[Array, "... i j"]) -> Float[Array, "... j i"]:
    """A transposed copy. Without the barrier XLA folds it into the product that reads it, whose CPU code is then
    three times slower."""
    return jax.lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


def row_sums(x: Float[Array, "*S n"]) -> Float[Array, "*S"]:
    """The sum over the last axis, as one product of a matrix with ones: XLA's CPU code for a fused sum over the last
    of many axes takes ten times as long."""
    size = x.shape[-1]
    rows = jax.lax.optimization_barrier(x).reshape(-1, size)
    return jnp.matmul(rows, jnp.ones((size,), x.dtype), precision="highest").reshape(x.shape[:-1])


def merge_heads(x: Float[Array, "... i r j"]) -> Float[Array, "... i rj"]:
    return x.reshape(*x.shape[:-2], -1)


def per_head(t: Float[Array, "... r i j"], x: Float[Array, "... j r v"], precision) -> Float[Array, "... i r v"]:
    """A product per value head, Σ_j t[r, i, j] x[j, r, v]."""
    if t.shape[-3] == 1:
        return matmul(t[..., 0, :, :], merge_heads(x), precision)[..., None, :]
    return jnp.swapaxes(matmul(t, jnp.swapaxes(x, -3, -2), precision), -3, -2)


@jax.custom_jvp
def sums(g: Float[Array, "*S C"]) -> tuple[Float[Array, "*S C C"], Float[Array, "*S C"], Float[Array, "*S C"]]:
    """Sums of g over (j, i], over [0, i] and over (i, C), exact enough to be exponents.

    A difference of two prefix sums would lose what its terms have lost to rounding, which is 1e-4 of Γ beside strong
    gates. So each g is cut into a multiple of a quantum, coarse enough for its prefix sums to be exact (64 · 104 in
    steps of 2^-10 fill 24 bits), and a remainder below half a quantum, rounded to a quantum of its own by the same rule
    (2^-28 for 64 tokens in float32, 4e-9 of a decay). The result is as exact as a sum over (j, i] itself, at the cost
    of two prefix sums, and, since both are exact, independent of other segments' tokens to the last bit.
    """
    size = g.shape[-1]
    quantum = 2.0 ** (max(size, 16).bit_length() - 17)
    fine_quantum = quantum * size * 2.0 ** -(jnp.finfo(g.dtype).nmant + 1)
    coarse = jnp.round(g / quantum) * quantum
    fine = jnp.round((g - coarse) / fine_quantum) * fine_quantum
    ones = jnp.triu(jnp.ones((size, size), g.dtype))
    coarse, fine = (jnp.matmul(x, ones, precision="highest") for x in (coarse, fine))

    def add(f):
        return f(coarse) + f(fine)

    return add(lambda x: x[..., :, None] - x[..., None, :]), add(lambda x: x), add(lambda x: x[..., -1:] - x)


@sums.defjvp
def _(primals, tangents):
    """The sums are linear in g. Their derivative adds up the terms of each sum alone, so that nothing cancels."""
    (g,), (t,) = primals, tangents
    ones = jnp.ones((g.shape[-1],) * 2, g.dtype)
    after = jnp.broadcast_to(jnp.tril(ones, -1), (*t.shape, t.shape[-1]))  # l > j
    pair = jnp.matmul(jnp.tril(ones), t[..., :, None] * after, precision="highest")
    start, end = (jnp.matmul(t, x, precision="highest") for x in (jnp.triu(ones), jnp.tril(ones, -1)))
    return sums(g), (pair, start, end)


def decays(g: Float[Array, "n B h r C"], boundary: Bool[Array, "n B 1 1 C"] | None) -> Decay:
    """All decays within chunks. Resets are cut by masks, and their g is left out of the sums."""
    size = g.shape[-1]
    reset = g < RESET
    if boundary is not None:
        reset |= boundary
    pair, start, end = sums(jnp.where(reset, 0, g))
    segment = jnp.matmul(reset.astype(g.dtype), jnp.triu(jnp.ones((size, size), g.dtype)), precision="highest")
    same = segment[..., :, None] == segment[..., None, :]
    same &= jnp.broadcast_to(jnp.tril(jnp.ones((size, size), bool), -1), same.shape)

    def masked_exp(mask, exponent):
        return jnp.where(mask, jnp.exp(jnp.where(mask, exponent, 0)), 0)

    pair = masked_exp(same, pair)
    start = masked_exp(segment == 0, start)
    end = masked_exp(segment == segment[..., -1:], end)
    return Decay(pair, jnp.swapaxes(start, -1, -2), jnp.swapaxes(end, -1, -2), start[..., -1], reset)


def inverse(m: Float[Array, "... C C"]) -> Float[Array, "... C C"]:
    """(I + M)^-1 of strictly lower triangular M.

    Blocks of 1, 2, 4, ... rows on the diagonal are merged: [[T1, 0], [−T2 M21 T1, T2]]. No power of M is formed:
    those reach 1e17 for repeated keys,
    while the entries of T stay near 1. Up to 16 rows, all merges of a level are one product of 16 × 16 blocks. Always
    in full precision.
    """
    size = m.shape[-1]
    block = min(size, BLOCK)
    rows = jnp.arange(block)

    def diagonal(width):
        """The blocks of M on the diagonal, [..., size / width, width, width]."""
        count = size // width
        blocks = m.reshape(*m.shape[:-2], count, width, count, width)
        return jnp.stack([blocks[..., i, :, i, :] for i in range(count)], axis=-3)

    def level(width):
        """Mask of the lower left quarters of the blocks of 2 `width` rows."""
        pair, half = rows // (2 * width), rows // width
        mask = (pair[:, None] == pair[None, :]) & (half[:, None] > half[None, :])
        return jnp.broadcast_to(mask, small.shape)

    small = diagonal(block)
    t = jnp.broadcast_to(jnp.eye(block, dtype=m.dtype), small.shape) - jnp.where(level(1), small, 0)
    width = 2
    while width < block:
        t = t - matmul(t, matmul(jnp.where(level(width), small, 0), t, "highest"), "highest")
        width *= 2
    while width < size:
        lower = diagonal(2 * width)[..., width:, :width]
        first, second = t[..., 0::2, :, :], t[..., 1::2, :, :]
        corner = -matmul(second, matmul(lower, first, "highest"), "highest")
        t = jnp.concatenate(
            [
                jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1),
                jnp.concatenate([corner, second], axis=-1),
            ],
            axis=-2,
        )
        width *= 2
    return t[..., 0, :, :]


class Tokens(NamedTuple):
    """The arguments of the op for the tokens of one group, or with a leading axis of groups."""

    q: Float[Array, "*G B n C h K"]
    k: Float[Array, "*G B n C h K"]
    v: Float[Array, "*G B n C H V"]
    g: Float[Array, "*G B n C H"]
    beta: Float[Array, "*G B n C H"]
    boundary: Bool[Array, "*G B n C"] | None
    mask: Bool[Array, "*G B n C"] | None


def heads_first(x: Float[Array, "B n C h ..."]) -> Float[Array, "n B h C ..."]:
    return jnp.moveaxis(x, (1, 0, 3, 2), (0, 1, 2, 3))


def tokens_first(x: Float[Array, "n B h C ..."]) -> Float[Array, "B n C h ..."]:
    """The inverse of `heads_first`."""
    return jnp.moveaxis(x, (0, 1, 2, 3), (1, 0, 3, 2))


def gather(tokens: Tokens, options: Options) -> Group:
    """What the tokens of a group give before any state is known (all but T)."""
    q, k, v, g, beta, boundary, mask = tokens
    heads, groups, dtype = v.shape[-2], k.shape[-2], g.dtype
    scale, l2norm_eps, precision = options.scale, options.l2norm_eps, options.precision
    if mask is not None:  # masked values, NaN included, go no further
        q, k, v, g, beta = (jnp.where(mask.reshape(*mask.shape, *[1] * (x.ndim - 3)), x, 0) for x in (q, k, v, g, beta))
    k, q = heads_first(k).astype(dtype), heads_first(q).astype(dtype)
    norms = None
    if l2norm_eps is not None:
        inverse_norm = lambda x: inverse_root(row_sums(x * x)[..., None], l2norm_eps)  # noqa: E731
        norms = (inverse_norm(k), inverse_norm(q))
        k, q = k * norms[0], q * norms[1]
    kq = jnp.concatenate([k, q * scale], axis=-2)
    size = k.shape[-2]

    def split_heads(x):
        return x.reshape(*x.shape[:3], groups, heads // groups, *x.shape[4:])

    v, beta, g = (heads_first(split_heads(x)) for x in (v.astype(dtype), beta, g))
    if boundary is not None:
        boundary = jnp.moveaxis(boundary, 1, 0)[:, :, None, None]
    decay = decays(jnp.swapaxes(g, -1, -2), boundary)
    products = matmul_t(kq, kq[..., :size, :], precision)
    gram, read = products[..., :size, :], products[..., size:, :]
    lower = decay.pair + jnp.broadcast_to(jnp.eye(size, dtype=dtype), decay.pair.shape)
    return Group(kq, transposed(kq), v, beta, decay, gram, read, read[..., None, :, :] * lower, norms)


def triangle(group: Group) -> Float[Array, "n B h r C C"]:
    """T of every chunk and value head of a group."""
    rate = jnp.swapaxes(group.beta, -1, -2)[..., None]
    return inverse(rate * group.gram[..., None, :, :] * group.decay.pair)


class Pass(NamedTuple):
    """What the scan over the chunks of a group gives."""

    states: Float[Array, "n B h K r V"]  # before each chunk
    from_state: Float[Array, "n B h 2C r V"]  # K S above scale Q S
    new_values: Float[Array, "n B h C r V"]  # N


def states(
    group: Group, t: Float[Array, "n B h r C C"], state: Float[Array, "B h K r V"], options: Options
) -> tuple[Float[Array, "B h K r V"], Pass]:
    """Run the chunks of a group. Returns the state after them, and what each chunk met and wrote."""
    size, precision = group.v.shape[-3], options.precision
    narrow = options.state_dtype if jnp.finfo(options.state_dtype).bits < 32 else state.dtype

    def chunk(state, x):
        kq, kq_t, v, beta, start, end, whole, t = x
        values = v.shape[-2:]
        met = matmul(kq, merge_heads(state), precision).reshape(*kq.shape[:-1], *values)
        rest = beta[..., None] * (v - start[..., None] * met[..., :size, :, :])
        new = per_head(t, rest, precision)
        written = matmul(kq_t[..., :size], merge_heads(end[..., None] * new), precision).reshape(state.shape)
        after = whole[..., None, :, None] * state + written
        return after.astype(narrow).astype(state.dtype), Pass(state, met, new)

    d = group.decay
    return jax.lax.scan(chunk, state, (group.kq, group.kq_t, group.v, group.beta, d.start, d.end, d.whole, t))


def forward(
    tokens: Tokens, state: Float[Array, "B h K r V"], options: Options
) -> tuple[Float[Array, "B h K r V"], Float[Array, "B n C H V"], Float[Array, "n B h r C C"]]:
    """One group of chunks: the state after it, its output in v's dtype, and T."""
    group = gather(tokens, options)
    t = triangle(group)
    state, run = states(group, t, state, options)
    read = run.from_state[..., group.v.shape[-3] :, :, :]
    out = group.decay.start[..., None] * read + per_head(group.a, run.new_values, options.precision)
    return state, tokens_first(out).reshape(tokens.v.shape).astype(tokens.v.dtype), t


def carried(initial_state: Float[Array, "B H K V"], key_heads: int) -> Float[Array, "B h K r V"]:
    """The state in the layout in which it is carried: value heads beside their key head, in the feature axes."""
    batch, heads, *sizes = initial_state.shape
    return jnp.swapaxes(initial_state.reshape(batch, key_heads, heads // key_heads, *sizes), -3, -2)


def returned(state: Float[Array, "*G B h K r V"]) -> Float[Array, "*G B H K V"]:
    """The inverse of `carried`."""
    state = jnp.swapaxes(state, -3, -2)
    return state.reshape(*state.shape[:-4], -1, *state.shape[-2:])


def chunked(q, k, v, g, beta, initial_state, boundary, mask, options: Options):
    """The chunked rule, for JAX to differentiate. Each group is computed again in the backward pass, from the state
    before it."""
    p = plan(q.shape[1], options)
    tokens = Tokens(q, k, v, g, beta, boundary, mask)

    @jax.checkpoint
    def group(state, tokens):
        return forward(tokens, state, options)[:2]

    state, out = jax.lax.scan(group, carried(initial_state, k.shape[2]), split(tokens, p))
    return join(out, p), returned(state)
