r"""The forward kernel: one pass over [B T C] as it lies, a tile of tokens and a block of channels a step.

Tiles of a row follow one another, and the last tokens of one are carried to the next in the scratch. With h half of the
sum before the activation, SiLU is h + h tanh h: one transcendental, and its absolute error is a few ulps of h.
"""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from .._manual import result
from .tpu_common import HALO, Inputs, Options, Step, Tiles, combine, common, lanes

# Bundles per 64 tokens × 128 channels on tpu7x, W = 4, bf16, SiLU: 24.6, and 31.7 where segments are given (with a body
# for trips without a boundary beside one for the others: 25 in the first, 72 in both). The four vector slots are taken
# (0.94): 10.5 operations a register and its pop, and 3 more that cut. Tried, cutting 1,024 channels (33.3): 64 tokens
# in flight spill (34.9), and so do masks by one transposition a tap (33.8). Tried without cuts: even and odd tokens
# apart in 32-bit words 32, as products with diagonal matrices 35 (bound by the MXU). Bytes: 19.5.
TILES = Tiles(tokens=1024, channels=2048, rows=32)


def _step(refs: dict, options: Options, tiles: Tiles):
    """One tile."""
    step = Step(refs, options, tiles, row=pl.program_id(1), tile=pl.program_id(2))
    xs_ref, y_ref = refs["xs"], refs["y"]

    @pl.when(step.tile == 0)
    def _():
        step.begin()

    @pl.when(step.tile > 0)
    def _():
        xs_ref[:, :HALO, :] = xs_ref[:, tiles.tokens :, :]

    def trip(start):
        step.spread(start)
        if step.placed:
            for block in tiles.blocks(start):
                for pair in tiles.pairs:
                    step.stage(pair, block)
            step.place()
        for block in tiles.blocks(start):
            for pair in tiles.pairs:
                if not step.placed:
                    step.stage(pair, block)
                ys = []
                for g in pair:
                    y = combine(step.inputs(g, block), step.taps(g))
                    if options.activation == "silu":
                        y = y + y * jnp.tanh(y)
                    ys.append(step.cut(y, 0, block))
                y = jnp.concatenate(ys, axis=1).astype(y_ref.dtype)
                y_ref[pl.ds(block, tiles.rows), lanes(pair[0], len(pair))] = y

    tiles.trips(trip)


def conv_forward(
    inputs: Inputs, options: Options, *, interpret=False, tiles: Tiles | None = None
) -> Float[Array, "B T C"]:
    """The outputs, in x's dtype. `tiles` says what a step takes at most."""
    tiles = (tiles or TILES).fit(inputs.x)
    call = common(inputs, options, tiles)
    call.outputs["y"] = result(inputs.x.shape, inputs.x.dtype, inputs.x), call.arrays["x"][1]
    (y,) = call.run(lambda refs: _step(refs, options, tiles), "conv_forward", interpret)
    return y
