"""What the two kernels share: their inputs, and a tile as it lies in the scratch.

A tile of x lies in a float32 scratch [groups, 8 + tokens, 128], 128 channels a group, with the 8 tokens before it in
front. Rows of a group lie one after the other there, so that the input k tokens back is a load k rows higher; a load at
any row costs what an aligned one does. What a tap must not read is cut by a mask of ones or zeros a tap and token,
spread over the lanes: one load and one `and`, in which no NaN survives. All groups of a tile share the masks.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from .._kernels import launch

LANES = 128
HALO = 8  # tokens kept beside a tile: a register's height, and no less than the widest convolution's past
TRIP = 256  # tokens a trip of the loop over a tile, at most
VMEM = 48 * 2**20  # bytes allowed; the kernels' tiles take 20 to 45 MiB, float32 with W = 8 the most


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
    masked: bool  # whether there are tokens that are not real


class Tiles(NamedTuple):
    """Sizes of a step: what a tile is, and how many of its tokens are in flight, which the registers limit."""

    tokens: int
    channels: int
    rows: int

    def fit(self, x) -> "Tiles":
        """No larger, for x [B T C]. Tokens: a multiple of 128, since `bits` has them in the lanes. Channels: the most
        that divide C."""
        _, length, channels = x.shape
        fits = max(size for size in range(LANES, self.channels + 1, LANES) if channels % size == 0)
        return Tiles(min(self.tokens, pl.cdiv(length, LANES) * LANES), fits, self.rows)

    @property
    def trip(self) -> int:
        """Tokens a trip of the loop over a tile: a trip's head and tail leave the vector units idle, and its code is
        short enough."""
        return math.gcd(TRIP, self.tokens)

    @property
    def pairs(self) -> list[range]:
        """Two groups fill a register of 16-bit values, eight tokens high."""
        groups = self.channels // LANES
        return [range(g, min(g + 2, groups)) for g in range(0, groups, 2)]

    def count(self, length: int) -> int:
        """How many tiles a row of `length` tokens has."""
        return pl.cdiv(length, self.tokens)

    def trips(self, body, *, reverse: bool = False):
        """`body(start)` for each trip of a tile, the last first with `reverse`."""
        count = self.tokens // self.trip

        def trip(i, _):
            body(pl.multiple_of((count - 1 - i if reverse else i) * self.trip, self.trip))
            return 0

        jax.lax.fori_loop(0, count, trip, 0)

    def blocks(self, start, *, reverse: bool = False) -> list:
        """Where the blocks of `rows` tokens begin that a trip is made of, the last first with `reverse`."""
        order = range(0, self.trip, self.rows)
        return [pl.multiple_of(start + i, self.rows) for i in (reversed(order) if reverse else order)]


def lanes(group: int, count: int = 1):
    """The channels of a group, or of several side by side."""
    return pl.ds(group * LANES, count * LANES)


def combine(inputs: list, taps: list):
    """Σ taps ∘ inputs (+ bias, where `taps` has one more)."""
    total = inputs[0] * taps[0]
    for x, tap in zip(inputs[1:], taps[1:]):
        total = total + x * tap
    return total + taps[-1] if len(taps) > len(inputs) else total


class Step(NamedTuple):
    """A step of a kernel: tile number `tile` of batch row `row`."""

    refs: dict
    options: Options
    tiles: Tiles
    row: Any
    tile: Any

    @property
    def placed(self) -> bool:
        """Whether the past lies before a token that only the kernel learns."""
        return "first" in self.refs

    @property
    def backs(self) -> range:
        """The taps that have a mask, by how many tokens back they read."""
        return range(0 if self.options.masked else 1, self.options.width if "bits" in self.refs else 0)

    def begin(self):
        """The 8 rows before a row of tokens: the past, or zeros where it is placed later or there is none."""
        xs_ref, past_ref = self.refs["xs"], self.refs.get("past")
        for g in range(xs_ref.shape[0]):
            if past_ref is None or self.placed:
                xs_ref[g, :HALO, :] = jnp.zeros((HALO, LANES), jnp.float32)
            else:
                xs_ref[g, :HALO, :] = past_ref[:, lanes(g)]

    def stage(self, pair: range, start):
        """Copy `rows` tokens of two groups to the scratch."""
        rows = self.tiles.rows
        x = self.refs["x"][pl.ds(start, rows), lanes(pair[0], len(pair))].astype(jnp.float32)
        for i, g in enumerate(pair):
            self.refs["xs"][g, pl.ds(start + HALO, rows), :] = x[:, i * LANES : (i + 1) * LANES]

    def place(self):
        """Write the past before the first real token, as far as it lies in the scratch: over masked tokens, so that it
        comes after `stage`."""
        xs_ref, width = self.refs["xs"], self.options.width
        groups, rows, _ = xs_ref.shape
        offset = self.refs["first"][self.row] - self.tile * self.tiles.tokens
        for i in range(HALO - width + 1, HALO):

            @pl.when((offset + i >= 0) & (offset + i < rows))
            def _(i=i):
                for g in range(groups):
                    xs_ref[g, pl.ds(offset + i, 1), :] = self.refs["past"][i : i + 1, lanes(g)]

    def spread(self, start):
        """The masks of a trip's tokens from their bits: [1 N] → [N 128] a tap, all ones or all zeros."""
        for i in range(0, self.tiles.trip, LANES) if self.backs else ():
            here = pl.ds(pl.multiple_of(start + i, LANES), LANES)
            bits = jnp.broadcast_to(self.refs["bits"][:, here], (LANES, LANES)).T
            for plane, back in enumerate(self.backs):
                self.refs["masks"][plane, here, :] = (bits << (31 - back)) >> 31

    def cut(self, x, back: int, start):
        """`rows` tokens of a group, 0 where the mask of this tap is."""
        if back not in self.backs:
            return x
        mask = self.refs["masks"][self.backs.index(back), pl.ds(start, self.tiles.rows), :]
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.int32) & mask, jnp.float32)

    def taps(self, group: int) -> list:
        """Rows [1 128] of a group, oldest tap first, then the bias."""
        return [self.refs["taps"][w : w + 1, lanes(group)] for w in range(self.options.width + self.options.bias)]

    def inputs(self, group: int, start) -> list:
        """What each tap of `rows` tokens reads, oldest first: `width` arrays [rows 128]."""
        rows, xs_ref = self.tiles.rows, self.refs["xs"]
        backs = reversed(range(self.options.width))
        return [self.cut(xs_ref[group, pl.ds(start + HALO - back, rows), :], back, start) for back in backs]


class Call(NamedTuple):
    """A launch: arguments of `launch` by name, in order."""

    grid: tuple
    arrays: dict  # name: (array, its block)
    outputs: dict  # name: (shape and dtype, its block)
    scratch: dict
    aliases: dict[str, str]  # inputs whose memory an output takes

    def run(self, kernel, name: str, interpret):
        """Launch `kernel(refs by name)`; its outputs."""
        names = (*self.arrays, *self.outputs, *self.scratch)
        order = list(self.arrays), list(self.outputs)
        return launch(
            lambda *refs: kernel(dict(zip(names, refs))),
            grid=self.grid,
            in_specs=[block for _, block in self.arrays.values()],
            out_specs=[block for _, block in self.outputs.values()],
            out_shape=[shape for shape, _ in self.outputs.values()],
            scratch_shapes=list(self.scratch.values()),
            input_output_aliases={order[0].index(i): order[1].index(o) for i, o in self.aliases.items()},
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
            ),
            name=name,
            interpret=interpret,
        )(*(array for array, _ in self.arrays.values()))


def common(inputs: Inputs, options: Options, tiles: Tiles, *, reverse: bool = False) -> Call:
    """What both kernels launch with, over (channel block, batch row, tile); with `reverse` a row's last tile first."""
    batch, length, total = inputs.x.shape
    tokens, channels, _ = tiles
    count, share, groups = tiles.count(length), batch // inputs.taps.shape[0], channels // LANES

    def flip(t):
        return count - 1 - t if reverse else t

    arrays: dict = {
        "x": (inputs.x, pl.BlockSpec((None, tokens, channels), lambda c, b, t: (b, flip(t), c))),
        "taps": (
            inputs.taps,
            pl.BlockSpec((None, options.width + 1, channels), lambda c, b, t: (jax.lax.div(b, share), 0, c)),
        ),
    }
    scratch = {"xs": pltpu.VMEM((groups, HALO + tokens, LANES), jnp.float32)}
    if inputs.past is not None:
        arrays["past"] = inputs.past, pl.BlockSpec((None, HALO, channels), lambda c, b, t: (b, 0, c))
    if inputs.bits is not None:
        arrays["bits"] = inputs.bits, pl.BlockSpec((None, 1, tokens), lambda c, b, t: (b, 0, flip(t)))
        scratch["masks"] = pltpu.VMEM((options.width - (not options.masked), HALO + tokens, LANES), jnp.int32)
    if inputs.first is not None:
        arrays["first"] = inputs.first, pl.BlockSpec(memory_space=pltpu.SMEM)
    return Call((total // channels, batch, count), arrays, {}, scratch, {})
