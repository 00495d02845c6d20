r"""The backward kernel. It reads x and dy once, computes the sum before the activation again, and keeps nothing else.

Tiles run from the last to the first, and so do the rows inside: the cotangents d of later tokens are there when the
gradient of x needs them, carried from tile to tile in a scratch beneath the tile's own, and so are their masks. With h
half of the sum before the activation and t = tanh h, twice SiLU's derivative is (1 + t)(1 + h − h t); the taps that it
meets are halved. The gradient of x is written over dy.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .._manual import result
from .tpu_common import HALO, LANES, Inputs, Options, Step, Tiles, combine, common, lanes

# Bundles per 64 tokens × 128 channels on tpu7x, W = 4, bf16, SiLU: 69.3, and 86.1 where segments are given (with a body
# for trips without a boundary beside one for the others: 71 in the first, 190 in both). The vector slots are taken
# (0.92, 0.90): 30.5 operations a register and its pop, and 6 more that cut. 32 and 64 tokens in flight instead of 16:
# 88.2 and 90.1; 512 channels: 90.9. A cut copy of d for each tap issues 85.8, but takes 8 MiB more. Bytes: 29.3.
TILES = Tiles(tokens=1024, channels=1024, rows=64)
CUT_ROWS = 16  # tokens in flight where masks are loaded, too
BEFORE = 16  # tokens in the block that holds the ones before a tile


def _add_rows(x):
    """[rows 128] → [8 128], as a tree."""
    parts = [x[i : i + 8] for i in range(0, x.shape[0], 8)]
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]


def _step(refs: dict, options: Options, tiles: Tiles, length: int, share: int):
    """One tile."""
    row, number, count = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
    step = Step(refs, options, tiles, row, count - 1 - number)
    tokens, rows, width = tiles.tokens, tiles.rows, options.width
    dy_ref, dx_ref, xs_ref, ds_ref, sums_ref = (refs[name] for name in ("dy", "dx", "xs", "ds", "sums"))
    masks_ref: Any = refs.get("masks")
    groups = xs_ref.shape[0]

    @pl.when((number == 0) & (jax.lax.rem(row, share) == 0))
    def _():
        sums_ref[...] = jnp.zeros(sums_ref.shape, jnp.float32)

    @pl.when(number == 0)
    def _():
        ds_ref[:, tokens:, :] = jnp.zeros((groups, HALO, LANES), jnp.float32)
        if step.backs:
            masks_ref[:, tokens:, :] = jnp.zeros((len(step.backs), HALO, LANES), jnp.int32)
        if length % tokens:
            # what lies after a row is anything, and counts as zero
            for ref in (refs["x"], dy_ref):
                ref[length % tokens :, :] = jnp.zeros((tokens - length % tokens, ref.shape[1]), ref.dtype)

    @pl.when(number > 0)
    def _():
        ds_ref[:, tokens:, :] = ds_ref[:, :HALO, :]
        if step.backs:
            masks_ref[:, tokens:, :] = masks_ref[:, :HALO, :]

    @pl.when(step.tile == 0)
    def _():
        step.begin()

    if "before" in refs:

        @pl.when(step.tile > 0)
        def _():
            for g in range(groups):
                xs_ref[g, :HALO, :] = refs["before"][BEFORE - HALO :, lanes(g)].astype(jnp.float32)

    def stage(start):
        for pair in tiles.pairs:
            step.stage(pair, start)

    def gradient(g, start, d):
        taps, inputs = step.taps(g), step.inputs(g, start)
        if options.activation == "silu":
            h = combine(inputs, taps)
            t = jnp.tanh(h)
            d = d * ((1 + t) * (1 + (h - h * t)))
        d = step.cut(d, 0, start)
        ds_ref[g, pl.ds(start, rows), :] = d
        for w, x in enumerate(inputs):
            sums_ref[g, w] += _add_rows(d * x)
        if options.bias:
            sums_ref[g, width] += _add_rows(d)
        later = [
            step.cut(ds_ref[g, pl.ds(start + back, rows), :], back, start + back) for back in range(width - 1, 0, -1)
        ]
        return step.cut(combine([*later, d], taps[:width]), 0, start)

    def gradients(start):
        for pair in tiles.pairs:
            d = dy_ref[pl.ds(start, rows), lanes(pair[0], len(pair))].astype(jnp.float32)
            dxs = [gradient(g, start, d[:, i * LANES : (i + 1) * LANES]) for i, g in enumerate(pair)]
            dx_ref[pl.ds(start, rows), lanes(pair[0], len(pair))] = jnp.concatenate(dxs, axis=1).astype(dx_ref.dtype)

    def trip(start):
        step.spread(start)
        blocks = tiles.blocks(start, reverse=True)
        # a block ahead: the taps of a block's first tokens read the ones before it
        ahead = [*blocks[1:], pl.multiple_of(jnp.maximum(start - rows, 0), rows)]
        if step.placed:
            for block in ahead:
                stage(block)
            step.place()
        for block, before in zip(blocks, ahead):
            if not step.placed:
                stage(before)
            gradients(block)

    stage(tokens - rows)
    tiles.trips(trip, reverse=True)

    @pl.when((number == count - 1) & (jax.lax.rem(row, share) == share - 1))
    def _():
        factor = 0.5 if options.activation == "silu" else 1.0
        for g in range(groups):
            for w in range(width + 1):
                total = jnp.sum(sums_ref[g, w], axis=0, keepdims=True)
                refs["dtaps"][w : w + 1, lanes(g)] = factor * total


def conv_backward(
    inputs: Inputs, dy: Float[Array, "B T C"], options: Options, *, interpret=False, tiles: Tiles | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "M R C"]]:  # fmt: skip
    """The gradients of x, in its dtype, and of taps and bias, float32: sums over tokens and each group's batch rows.
    `tiles` says what a step takes at most. The gradient of x takes the memory of dy, which XLA copies where it is read
    again."""
    batch, length, _ = inputs.x.shape
    tiles = (tiles or (TILES if inputs.bits is None else TILES._replace(rows=CUT_ROWS))).fit(inputs.x)
    call = common(inputs, options, tiles, reverse=True)
    count, groups, width = tiles.count(length), tiles.channels // LANES, options.width
    call.arrays["dy"] = dy, call.arrays["x"][1]
    if count > 1:
        each = tiles.tokens // BEFORE

        def before(c, b, t):
            return b, jnp.maximum((count - 1 - t) * each - 1, 0), c

        call.arrays["before"] = inputs.x, pl.BlockSpec((None, BEFORE, tiles.channels), before)
    call.outputs["dx"] = result(inputs.x.shape, inputs.x.dtype, inputs.x), call.arrays["x"][1]
    call.outputs["dtaps"] = result(inputs.taps.shape, jnp.float32, inputs.taps), call.arrays["taps"][1]
    if not interpret or length % tiles.tokens == 0:
        # JAX's interpreters cannot do so where the last tile is not full: they return padded arrays, or take what is
        # written to dy's window for the gradient
        call.aliases["dy"] = "dx"
    call.scratch["ds"] = pltpu.VMEM((groups, HALO + tiles.tokens, LANES), jnp.float32)
    call.scratch["sums"] = pltpu.VMEM((groups, width + 1, 8, LANES), jnp.float32)
    share = batch // inputs.taps.shape[0]
    dx, dtaps = call.run(lambda refs: _step(refs, options, tiles, length, share), "conv_backward", interpret)
    return dx, dtaps
