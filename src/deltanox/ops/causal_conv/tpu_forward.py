r"""The forward kernel: one pass over [B T C] as it lies, a tile of tokens and a block of channels a step.

Tiles of a row follow one another, and the last tokens of one are carried to the next in the scratch. With h half of the
sum before the activation, SiLU is h + h tanh h: one transcendental, and its absolute error is a few ulps of h.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .._manual import result
from .tpu_common import (  # fmt: skip
    HALO,
    LANES,
    ROWS,
    Call,
    Inputs,
    Options,
    Tiles,
    begin,
    blocks,
    columns,
    combine,
    common_arrays,
    has,
    in_loop,
    in_pairs,
    inputs_of,
    lanes,
    place_past,
    read_taps,
    stage,
    trips,
)

# Bundles per 64 tokens × 128 channels on tpu7x: 24.9 with trips of 256 tokens, 25.5 of 128, 26.7 of 64. All four vector
# slots are taken: 10.5 operations a register and its pop. Tried: even and odd tokens apart in 32-bit words 32, as
# products with diagonal matrices 35 (bound by the MXU). Bytes: 19.5.
TILES = Tiles(tokens=1024, channels=1024)


def _step(refs: dict, options: Options, tiles: Tiles):
    """One tile."""
    x_ref, y_ref, xs_ref = refs["x"], refs["y"], refs["xs"]
    row, tile, count, tokens = pl.program_id(1), pl.program_id(2), pl.num_programs(2), tiles.tokens
    pairs = in_pairs(xs_ref.shape[0])

    @pl.when(tile == 0)
    def _():
        begin(xs_ref, refs.get("past"), "first" in refs)

    @pl.when(tile > 0)
    def _():
        xs_ref[:, :HALO, :] = xs_ref[:, tokens:, :]

    def place():
        if "first" in refs and "past" in refs:
            place_past(xs_ref, refs["past"], refs["first"][row] - tile * tokens, options.width)

    def outputs(start, bits):
        for pair in pairs:
            if bits is None:
                stage(x_ref, xs_ref, pair, start)
            ys = []
            for g in pair:
                y = combine(inputs_of(xs_ref, g, start, bits, options.width), read_taps(refs["taps"], g, options))
                if options.activation == "silu":
                    y = y + y * jnp.tanh(y)
                ys.append(y if bits is None else jnp.where(has(bits, 0), y, 0))
            y_ref[pl.ds(start, ROWS), lanes(pair[0], len(pair))] = jnp.concatenate(ys, axis=1).astype(y_ref.dtype)

    def plain_trip(start):
        for block in blocks(tiles, start):
            outputs(block, None)

    def masked_trip(start):
        columns(refs["bits"], refs["column"], start, tiles.trip)

        def body(block):
            for pair in pairs:
                stage(x_ref, xs_ref, pair, block)
            place()
            outputs(block, refs["column"][pl.ds(block, ROWS), :])

        in_loop(tiles, start, body)

    def trip(start):
        plain = refs["plain"][(row * count + tile) * (tokens // tiles.trip) + jax.lax.div(start, tiles.trip)]
        pl.when(plain == 1)(lambda: plain_trip(start))
        pl.when(plain == 0)(lambda: masked_trip(start))

    place()
    trips(tiles, trip if "bits" in refs else plain_trip)


def conv_forward(
    inputs: Inputs, options: Options, *, interpret=False, tiles: Tiles | None = None
) -> Float[Array, "B T C"]:
    """The outputs, in x's dtype. `tiles` says what a step takes at most."""
    batch, length, _ = inputs.x.shape
    tiles = (tiles or TILES).fit(inputs.x)
    scalars, arrays = common_arrays(inputs, options, tiles, lambda t: t, 0)
    outputs = {"y": (result(inputs.x.shape, inputs.x.dtype, inputs.x), *arrays["x"][1:])}
    scratch = {"xs": pltpu.VMEM((tiles.channels // LANES, HALO + tiles.tokens, LANES), jnp.float32)}
    if inputs.bits is not None:
        scratch["column"] = pltpu.VMEM((tiles.tokens, LANES), jnp.int32)
    grid = (inputs.x.shape[2] // tiles.channels, batch, tiles.count(length))
    call = Call(scalars, arrays, outputs, scratch)
    (y,) = call.run(lambda refs: _step(refs, options, tiles), "conv_forward", grid, interpret)
    return y
