r"""What the forward and the backward TPU kernel share: sizes, products of split operands, decays, and the inverse.

The notation is that of `chunked.py`. A kernel step holds a tile of several chunks for some key heads and the value
heads that read them; heads stay merged in the feature axis of the arrays in HBM, where a step picks its columns.
Inside, every stage is written for all heads before the next one, so that they fill each other's latencies. Traced
integers are divided by `jax.lax.div` and `jax.lax.rem`: `//` and `%` ask for the sign, whose code depends on the chip,
and `jax.export` names none.

Gates come as rows, time along the lanes: [B, H, T] in float32, with resets as a decay of −16,384, padded tokens with
g = 0 and β = 0. Sums of g over (j, i] are products with triangles of ones, in which each sum adds its own terms only,
so that nothing cancels, and exp makes an exact zero of what crosses a reset.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from .._dtypes import inverse_root

BLOCK = 16  # rows of the diagonal blocks that start the inverse
FORGET = -16384.0  # a decay that leaves nothing; exact in bfloat16, and sums of it stay finite


class Columns(NamedTuple):
    """`heads` heads of `size` features each in the columns of `array` [B, T, C] from `start` on."""

    array: Float[Array, "B T C"]
    start: int
    heads: int
    size: int


def column_block(x: Columns, heads: int, tile: int, pad: int, index: Callable) -> pl.BlockSpec:
    """A tile of tokens for `heads` heads, where the grid's last number is `t` and its tile index(t). The last tile has
    `pad` tokens too many."""
    width = heads * x.size
    block = (pl.Element(1), pl.Element(tile, (0, pad)), pl.Element(width))

    def place(b, j, t):  # all heads at once may be less than the lanes' multiple, which j's column must be
        return b, index(t) * tile, x.start + (0 if heads == x.heads else j * width)

    return pl.BlockSpec(block, place)


def as_rows(x: Float[Array, "B H T"], steps: int, pad: int) -> Float[Array, "B steps heads padded"]:
    """Gates for the steps of the grid, zeros behind the last token."""
    batch, heads, length = x.shape
    return jnp.pad(x, ((0, 0), (0, 0), (0, pad))).reshape(batch, steps, heads // steps, length + pad)


class Parts(NamedTuple):
    """Into how many bfloat16 parts the operands of a product are split; None is float32 at full precision."""

    keys: int | None
    state: int | None
    new: int | None
    inverse: int | None
    gates: int | None


PARTS = {
    "default": Parts(keys=1, state=1, new=1, inverse=1, gates=2),
    "high": Parts(keys=2, state=2, new=2, inverse=2, gates=3),
    "highest": Parts(keys=None, state=None, new=None, inverse=None, gates=3),
}


def split(x: Array, parts: int | None) -> tuple[Array, ...]:
    """`parts` bfloat16 arrays whose sum is x, or x itself in float32."""
    if parts is None:
        return (x.astype(jnp.float32),)
    if x.dtype == jnp.bfloat16:
        return (x,)
    high = x.astype(jnp.bfloat16)
    return (high,) if parts == 1 else (high, *split(x - high.astype(jnp.float32), parts - 1))


def product(xs: tuple[Array, ...], ys: tuple[Array, ...], dims: tuple[int, int] = (1, 0)) -> Array:
    """The product of two split matrices over the axes `dims`, float32: of their parts, without the pairs whose size is
    below the last part's."""
    numbers = (((dims[0],), (dims[1],)), ((), ()))
    if xs[0].dtype == jnp.float32:
        return jax.lax.dot_general(xs[0], ys[0], numbers, precision=jax.lax.Precision.HIGHEST)
    pairs = [(x, y) for i, x in enumerate(xs) for j, y in enumerate(ys) if i + j < max(len(xs), len(ys))]
    x, y = (jnp.concatenate(parts, axis=dim) if len(pairs) > 1 else parts[0] for parts, dim in zip(zip(*pairs), dims))
    return jax.lax.dot_general(x, y, numbers, preferred_element_type=jnp.float32)


def iotas(size: int) -> tuple[Array, Array]:
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (size, size), axis) for axis in (0, 1))
    return row, column


class Triangles(NamedTuple):
    """Constants of a chunk: [C, C] masks, and ones in bfloat16 for the sums of gates."""

    lower: Array  # i ≥ j
    strict: Array  # i > j
    upper_ones: Array  # l ≤ i
    strict_ones: Array  # l > j


def triangles(size: int) -> Triangles:
    row, column = iotas(size)
    one = lambda mask: jnp.where(mask, 1.0, 0.0).astype(jnp.bfloat16)  # noqa: E731
    return Triangles(row >= column, row > column, one(row <= column), one(row > column))


class Gates(NamedTuple):
    """Decays of a chunk and of `heads` value heads, as rows [heads, C]."""

    rate: Array  # β
    start: Array  # c: from the state before the chunk to each token
    end: Array  # d: from each token to the state after the chunk
    parts: tuple[Array, ...]  # g, split


def gates(g: Array, rate: Array, tri: Triangles) -> Gates:
    parts = split(g, 3)
    ones = (tri.upper_ones,), (tri.strict_ones,)
    start, end = (jnp.exp(product(parts, one)) for one in ones)
    return Gates(rate, start, end, parts)


def pair_decays(gates: Gates, head: int, tri: Triangles, parts: int) -> Array:
    """Γ [C, C] of a value head: right on and below the diagonal, one above it, for masks that come with it."""
    lower = tri.upper_ones.T
    rows = tuple(lower * part[head : head + 1] for part in gates.parts[:parts])
    return jnp.exp(product(rows, (tri.strict_ones,)))


class KeyHead(NamedTuple):
    """What a chunk's tokens give once a key head. `k` and `q` are normalised, `q` scaled."""

    k: Array  # [C, K]
    q: Array
    k_norm: Array | None  # [C, 1], rsqrt(Σ x² + ε)
    q_norm: Array | None
    keys: tuple[Array, ...]  # k, split
    both: tuple[Array, ...]  # k above q [2C, K], split
    gram: Array  # [C, C], k_i·k_j below the diagonal
    read: Array  # q_i·k_j on and below it


def key_heads(ks: list[Array], qs: list[Array], tri: Triangles, *, eps, scale: float, parts: int | None):
    """A `KeyHead` for each pair of keys and queries [C, K]."""
    size, result = ks[0].shape[0], []
    for k, q in zip(ks, qs):
        k, q, k_norm, q_norm = k.astype(jnp.float32), q.astype(jnp.float32), None, None
        if eps is not None:
            k_norm, q_norm = (inverse_root(jnp.sum(x * x, axis=1, keepdims=True), eps) for x in (k, q))
            k, q = k * k_norm, q * q_norm
        q = q * scale
        keys, both = split(k, parts), split(jnp.concatenate([k, q], axis=0), parts)
        result.append((k, q, k_norm, q_norm, keys, both))
    products = [product(both, keys, (1, 1)) for *_, keys, both in result]
    return [
        KeyHead(*x, jnp.where(tri.strict, y[:size], 0.0), jnp.where(tri.lower, y[size:], 0.0))
        for x, y in zip(result, products)
    ]


def inverse(ms: list[Array], parts: int | None, *, blocks: int = 1) -> list[Array]:
    """(I + M)^-1 of strictly lower triangular matrices [C, C], each stage for all of them before the next. With two
    `blocks`, the last merge is left out: the inverses of the two blocks on the diagonal, and zeros beside them.

    Blocks of 16 rows on the diagonal are inverted by substitution, all of them side by side in the lanes; then pairs of
    blocks are merged, [[T1, 0], [−T2 M21 T1, T2]]. No power of M is formed: those reach 1e17 for repeated keys.
    """
    size, half = ms[0].shape[-1], BLOCK // 2
    row, column = iotas(size)
    lane = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, size), 1)
    line = jax.lax.broadcasted_iota(jnp.int32, (BLOCK, size), 0)
    block_of_lane = jax.lax.div(lane, BLOCK)

    def diagonal(m):
        out = jnp.where(block_of_lane == 0, m[:BLOCK], 0.0)
        for i in range(1, size // BLOCK):
            out = jnp.where(block_of_lane == i, m[i * BLOCK : (i + 1) * BLOCK], out)
        return out

    def rows(x, first, width):
        """Every second block of `width` rows, from block `first` on."""
        return jnp.concatenate([x[i : i + width] for i in range(first * width, size, 2 * width)], axis=0)

    def weave(even, odd, width):
        half = range(0, size // 2, width)
        return jnp.concatenate([x[i : i + width] for i in half for x in (even, odd)], axis=0)

    compact = [diagonal(m) for m in ms]
    eye = jnp.where(jax.lax.rem(lane, BLOCK) == line, 1.0, 0.0)
    tops, bottoms = [eye[:half]] * len(ms), [eye[half:]] * len(ms)  # the upper rows are done first
    for j in range(BLOCK - 1):
        index = (block_of_lane * BLOCK + j)[:half]
        lines = [t[j : j + 1] if j < half else b[j - half : j - half + 1] for t, b in zip(tops, bottoms)]
        if j < half - 1:
            tops = [t - jnp.take_along_axis(c[:half], index, axis=1) * x for t, c, x in zip(tops, compact, lines)]
        bottoms = [b - jnp.take_along_axis(c[half:], index, axis=1) * x for b, c, x in zip(bottoms, compact, lines)]
    ts = [jnp.concatenate(pair, axis=0) for pair in zip(tops, bottoms)]
    in_block = jax.lax.div(row, BLOCK) == jax.lax.div(column, BLOCK)
    fulls = [jnp.where(in_block, jnp.concatenate([t] * (size // BLOCK), axis=0), 0.0) for t in ts]
    width = BLOCK
    while blocks * width < size:
        in_pair = jax.lax.div(row, 2 * width) == jax.lax.div(column, 2 * width)
        corner = rows(in_pair & (jax.lax.div(row, width) > jax.lax.div(column, width)), 1, width)
        splits = [split(full, parts) for full in fulls]
        lowers = [split(jnp.where(corner, rows(m, 1, width), 0.0), parts) for m in ms]
        middles = [split(product(x, y), parts) for x, y in zip(lowers, splits)]
        middles = [tuple(weave(jnp.zeros_like(x), x, width) for x in xs) for xs in middles]
        odds = [tuple(rows(x, 1, width) for x in xs) for xs in splits]
        corners = [product(x, y) for x, y in zip(odds, middles)]
        fulls = [weave(rows(f, 0, width), rows(f, 1, width) - c, width) for f, c in zip(fulls, corners)]
        width *= 2
    return fulls


def solve(ms: list[Array], rights: list[Array], parts: int | None) -> list[Array]:
    """(I + M)^-1 R from the inverses of two blocks, N1 = U1 R1 and N2 = U2 (R2 − M21 N1): less work than the last merge
    where R is the only right-hand side."""
    half = ms[0].shape[0] // 2
    us = [split(x, parts) for x in inverse(ms, parts, blocks=2)]
    firsts = [product(tuple(x[:half, :half] for x in u), split(r[:half], parts)) for u, r in zip(us, rights)]
    crosses = [product(split(m[half:, :half], parts), split(x, parts)) for m, x in zip(ms, firsts)]
    rests = [split(jnp.concatenate([x, r[half:] - c], axis=0), parts) for x, r, c in zip(firsts, rights, crosses)]
    seconds = [product(tuple(x[half:] for x in u), r) for u, r in zip(us, rests)]
    return [jnp.concatenate(pair, axis=0) for pair in zip(firsts, seconds)]
