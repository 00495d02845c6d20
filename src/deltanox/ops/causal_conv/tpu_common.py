"""What the two kernels share: their inputs, the scratch of tokens, taps and bits.

A tile of x lies in a float32 scratch [groups, 8 + tokens, 128], 128 channels a group, with the 8 tokens before it in
front. Rows of a group lie one after the other there, so that the input k tokens back is a load k rows higher; a load at
any row costs what an aligned one does. A tile is passed in trips. Most are plain: all of their taps read an input and
nothing is masked. The others look at one bit a tap.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

LANES = 128
HALO = 8  # tokens kept beside a tile: a register's height, and no less than the widest convolution's past
ROWS = 64  # tokens in flight: what the registers hold
TRIP = 256  # tokens a trip of the loop over a tile, at most
VMEM = 48 * 2**20  # bytes allowed; the kernels' tiles take 10 to 21 MiB


class Inputs(NamedTuple):
    """What both kernels read. M groups of B / M batch rows have taps of their own, R = W + 1 rows."""

    x: Float[Array, "B T C"]
    taps: Float[Array, "M R C"]  # oldest first, then the bias; float32; halved before a SiLU
    past: Float[Array, "B 8 C"] | None  # the W − 1 inputs before the first real token in the last rows; float32
    bits: Int[Array, "B 1 T"] | None  # bit k: tap k back reads an input of the token's segment; bit 0: a real token
    first: Int[Array, " B"] | None  # the first real token, which `past` lies before; None is 0


class Options(NamedTuple):
    """What is compiled in."""

    width: int
    bias: bool
    activation: str | None


class Tiles(NamedTuple):
    """Sizes of a step."""

    tokens: int
    channels: int

    def fit(self, x) -> "Tiles":
        """No larger, for x [B T C]. Tokens: a multiple of 128, since `bits` has them in the lanes. Channels: the most
        that divide C."""
        _, length, channels = x.shape
        fits = max(size for size in range(LANES, self.channels + 1, LANES) if channels % size == 0)
        return Tiles(min(self.tokens, pl.cdiv(length, LANES) * LANES), fits)

    @property
    def trip(self) -> int:
        """Tokens a trip of the loop over a tile: a trip's head and tail leave the vector units idle, its code is short
        enough, and few trips hold a boundary."""
        return math.gcd(TRIP, self.tokens)

    def count(self, length: int) -> int:
        """How many tiles a row of `length` tokens has."""
        return pl.cdiv(length, self.tokens)


def plain_trips(bits: Int[Array, "B 1 T"], tiles: Tiles, width: int, after: int) -> Int[Array, " N"]:
    """1 for each trip of each batch row in which, and `after` tokens after which, every bit is set."""
    batch, _, length = bits.shape
    padded = tiles.count(length) * tiles.tokens
    full = jnp.pad(bits[:, 0] == 2**width - 1, ((0, 0), (0, padded - length)), constant_values=True)
    full = full.reshape(batch, padded // tiles.trip, tiles.trip)
    begins = jnp.pad(jnp.all(full[:, 1:, :after], axis=2), ((0, 0), (0, 1)), constant_values=True)
    return (jnp.all(full, axis=2) & begins).reshape(-1).astype(jnp.int32)


def columns(bits_ref, column_ref, start, count: int):
    """The bits of `count` tokens, a token a row: [1 N] → [N 128]."""
    for i in range(0, count, LANES):
        here = pl.ds(pl.multiple_of(start + i, LANES), LANES)
        column_ref[here, :] = jnp.broadcast_to(bits_ref[:, here], (LANES, LANES)).T


def has(bits, back: int):
    """Where tap `back` reads an input."""
    return (bits & (1 << back)) != 0


def lanes(group: int, count: int = 1):
    """The channels of a group, or of several side by side."""
    return pl.ds(group * LANES, count * LANES)


def in_pairs(groups: int) -> list[range]:
    """Two groups fill a register of 16-bit values, eight tokens high."""
    return [range(g, min(g + 2, groups)) for g in range(0, groups, 2)]


def stage(x_ref, xs_ref, pair: range, start):
    """Copy ROWS tokens of two groups to the scratch."""
    x = x_ref[pl.ds(start, ROWS), lanes(pair[0], len(pair))].astype(jnp.float32)
    for i, g in enumerate(pair):
        xs_ref[g, pl.ds(start + HALO, ROWS), :] = x[:, i * LANES : (i + 1) * LANES]


def trips(tiles: Tiles, body, *, reverse: bool = False):
    """`body(start)` for each trip of a tile, the last first with `reverse`."""
    count = tiles.tokens // tiles.trip

    def trip(i, _):
        body(pl.multiple_of((count - 1 - i if reverse else i) * tiles.trip, tiles.trip))
        return 0

    jax.lax.fori_loop(0, count, trip, 0)


def blocks(tiles: Tiles, start, *, reverse: bool = False) -> list:
    """Where the blocks of ROWS tokens begin that a trip is made of, the last first with `reverse`."""
    order = range(0, tiles.trip, ROWS)
    return [pl.multiple_of(start + i, ROWS) for i in (reversed(order) if reverse else order)]


def in_loop(tiles: Tiles, start, body, *, reverse: bool = False):
    """`body(start)` for each of these blocks, in a loop."""
    count = tiles.trip // ROWS

    def block(i, _):
        body(pl.multiple_of(start + (count - 1 - i if reverse else i) * ROWS, ROWS))
        return 0

    jax.lax.fori_loop(0, count, block, 0)


def begin(xs_ref, past_ref, placed: bool):
    """The 8 rows before a row of tokens: the past, or zeros where it is placed later or there is none."""
    for g in range(xs_ref.shape[0]):
        if past_ref is None or placed:
            xs_ref[g, :HALO, :] = jnp.zeros((HALO, LANES), jnp.float32)
        else:
            xs_ref[g, :HALO, :] = past_ref[:, lanes(g)]


def place_past(xs_ref, past_ref, offset, width: int):
    """Write the past before the first real token, which is `offset` tokens after the tile's first."""
    groups, rows, _ = xs_ref.shape
    for i in range(HALO - width + 1, HALO):

        @pl.when((offset + i >= 0) & (offset + i < rows))
        def _(i=i):
            for g in range(groups):
                xs_ref[g, pl.ds(offset + i, 1), :] = past_ref[i : i + 1, lanes(g)]


def read_taps(taps_ref, group: int, options: Options) -> list:
    """Rows [1 128] of a group, oldest tap first, then the bias."""
    return [taps_ref[w : w + 1, lanes(group)] for w in range(options.width + options.bias)]


def inputs_of(xs_ref, group: int, start, bits, width: int) -> list:
    """What each tap of ROWS tokens reads, oldest first: `width` arrays [ROWS 128]."""
    out = []
    for back in reversed(range(width)):
        x = xs_ref[group, pl.ds(start + HALO - back, ROWS), :]
        out.append(x if bits is None else jnp.where(has(bits, back), x, 0))
    return out


def combine(inputs: list, taps: list):
    """Σ taps ∘ inputs (+ bias, where `taps` has one more)."""
    total = inputs[0] * taps[0]
    for x, tap in zip(inputs[1:], taps[1:]):
        total = total + x * tap
    return total + taps[-1] if len(taps) > len(inputs) else total


class Call(NamedTuple):
    """Arguments of `pl.pallas_call` by name, in order."""

    scalars: dict
    arrays: dict  # name: (array, block shape, index map over (channel block, batch row, tile))
    outputs: dict  # name: (shape and dtype, block shape, index map)
    scratch: dict

    def run(self, kernel, name: str, grid: tuple, interpret):
        """Launch `kernel(refs by name)`; its outputs."""
        names = (*self.scalars, *self.arrays, *self.outputs, *self.scratch)

        def spec(block, index):
            return pl.BlockSpec(block, lambda c, b, t, *_: index(c, b, t))

        return pl.pallas_call(
            lambda *refs: kernel(dict(zip(names, refs))),
            out_shape=[shape for shape, *_ in self.outputs.values()],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=len(self.scalars),
                grid=grid,
                in_specs=[spec(*where) for _, *where in self.arrays.values()],
                out_specs=[spec(*where) for _, *where in self.outputs.values()],
                scratch_shapes=list(self.scratch.values()),
            ),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
            ),
            name=name,
            interpret=interpret,
        )(*self.scalars.values(), *(array for array, *_ in self.arrays.values()))


def common_arrays(inputs: Inputs, options: Options, tiles: Tiles, flip, after: int):
    """The scalars and arrays of both kernels; tile number t reads tile flip(t)."""
    tokens, channels = tiles
    share = inputs.x.shape[0] // inputs.taps.shape[0]
    scalars: dict = {}
    arrays: dict = {
        "x": (inputs.x, (None, tokens, channels), lambda c, b, t: (b, flip(t), c)),
        "taps": (inputs.taps, (None, options.width + 1, channels), lambda c, b, t: (jax.lax.div(b, share), 0, c)),
    }
    if inputs.past is not None:
        arrays["past"] = (inputs.past, (None, HALO, channels), lambda c, b, t: (b, 0, c))
    if inputs.bits is not None:
        scalars["plain"] = plain_trips(inputs.bits, tiles, options.width, after)
        arrays["bits"] = (inputs.bits, (None, 1, tokens), lambda c, b, t: (b, 0, flip(t)))
        if inputs.first is not None:
            scalars["first"] = inputs.first
    return scalars, arrays
