r"""The backward kernel. It reads x and dy once, computes the sum before the activation again, and keeps nothing else.

Tiles run from the last to the first, and so do the rows inside: the cotangents d of later tokens are there when the
gradient of x needs them, carried from tile to tile in a scratch beneath the tile's own. With h half of the sum before
the activation and t = tanh h, twice SiLU's derivative is (1 + t)(1 + h − h t); the taps that it meets are halved.
"""

from typing import Any

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

# Bundles per 64 tokens × 128 channels on tpu7x: 71 with trips of 256 tokens, 72 of 128, 74 of 64, 81 with 32 tokens in
# flight. The vector slots are taken: 30.5 operations a register and its pop. Bytes: 29.3.
TILES = Tiles(tokens=1024, channels=512)
BEFORE = 16  # tokens in the block that holds the ones before a tile


def _add_rows(x):
    """[rows 128] → [8 128], as a tree."""
    parts = [x[i : i + 8] for i in range(0, x.shape[0], 8)]
    while len(parts) > 1:
        parts = [sum(parts[i + 1 : i + 2], parts[i]) for i in range(0, len(parts), 2)]
    return parts[0]


def _step(refs: dict, options: Options, tiles: Tiles, length: int, share: int):
    """One tile."""
    x_ref, dy_ref, dx_ref, xs_ref, ds_ref = (refs[name] for name in ("x", "dy", "dx", "xs", "ds"))
    row, number, count, tokens = pl.program_id(1), pl.program_id(2), pl.num_programs(2), tiles.tokens
    tile = count - 1 - number
    groups, width = xs_ref.shape[0], options.width
    pairs = in_pairs(groups)
    column_ref: Any = refs.get("column")
    every = (1 << width) - 1

    @pl.when((number == 0) & (jax.lax.rem(row, share) == 0))
    def _():
        refs["sums"][...] = jnp.zeros(refs["sums"].shape, jnp.float32)

    @pl.when(number == 0)
    def _():
        ds_ref[:, tokens:, :] = jnp.zeros((groups, HALO, LANES), jnp.float32)
        if column_ref is not None:
            column_ref[tokens:, :] = jnp.zeros((HALO, LANES), jnp.int32)

    @pl.when(number > 0)
    def _():
        ds_ref[:, tokens:, :] = ds_ref[:, :HALO, :]
        if column_ref is not None:
            column_ref[tokens:, :] = column_ref[:HALO, :]

    @pl.when(tile == 0)
    def _():
        begin(xs_ref, refs.get("past"), "first" in refs)

    if "before" in refs:

        @pl.when(tile > 0)
        def _():
            for g in range(groups):
                xs_ref[g, :HALO, :] = refs["before"][BEFORE - HALO :, lanes(g)].astype(jnp.float32)

    def place():
        if "first" in refs and "past" in refs:
            place_past(xs_ref, refs["past"], refs["first"][row] - tile * tokens, width)

    def stage_rows(start):
        for pair in pairs:
            stage(x_ref, xs_ref, pair, start)

    def stage_before(start):
        # a block ahead: the taps of a block's first tokens read the ones before it
        stage_rows(pl.multiple_of(jnp.maximum(start - ROWS, 0), ROWS))

    def gradients(start, bits):
        for pair in pairs:
            dys = dy_ref[pl.ds(start, ROWS), lanes(pair[0], len(pair))].astype(jnp.float32)
            dxs = []
            for i, g in enumerate(pair):
                d = dys[:, i * LANES : (i + 1) * LANES]
                taps = read_taps(refs["taps"], g, options)
                inputs = inputs_of(xs_ref, g, start, bits, width)
                if options.activation == "silu":
                    h = combine(inputs, taps)
                    t = jnp.tanh(h)
                    d = d * ((1 + t) * (1 + (h - h * t)))
                if bits is not None:
                    d = jnp.where(has(bits, 0), d, 0)
                ds_ref[g, pl.ds(start, ROWS), :] = d
                for w, x in enumerate(inputs):
                    refs["sums"][g, w] += _add_rows(d * x)
                if options.bias:
                    refs["sums"][g, width] += _add_rows(d)
                later = []
                for back in reversed(range(width)):
                    ahead = ds_ref[g, pl.ds(start + back, ROWS), :] if back else d
                    if bits is not None and back:
                        ahead = jnp.where(has(column_ref[pl.ds(start + back, ROWS), :], back), ahead, 0)
                    later.append(ahead)
                dx = combine(later, taps[:width])
                dxs.append(dx if bits is None else jnp.where(has(bits, 0), dx, 0))
            dx = jnp.concatenate(dxs, axis=1).astype(dx_ref.dtype)
            dx_ref[pl.ds(start, ROWS), lanes(pair[0], len(pair))] = dx

    def plain_trip(start):
        if column_ref is not None:
            column_ref[pl.ds(start, HALO), :] = jnp.full((HALO, LANES), every, jnp.int32)
        stage_before(start)
        place()
        *others, lowest = blocks(tiles, start, reverse=True)
        for block in (*others, lowest):
            if block is not lowest:
                stage_before(block)
            gradients(block, None)

    def masked_trip(start):
        if "bits" in refs:
            columns(refs["bits"], column_ref, start, tiles.trip)
        else:
            column_ref[pl.ds(start, tiles.trip), :] = jnp.full((tiles.trip, LANES), every, jnp.int32)

        def body(block):
            here = pl.ds(block, ROWS)
            if length % tokens:
                token = jax.lax.broadcasted_iota(jnp.int32, (ROWS, LANES), 0) + (tile * tokens + block)
                column_ref[here, :] = jnp.where(token < length, column_ref[here, :], 0)
            stage_before(block)
            place()
            gradients(block, column_ref[here, :])

        in_loop(tiles, start, body, reverse=True)

    def trip(start):
        plain: jax.Array | bool = True
        if "bits" in refs:
            index = (row * count + tile) * (tokens // tiles.trip) + jax.lax.div(start, tiles.trip)
            plain = refs["plain"][index] == 1
        if length % tokens:
            plain = plain & (tile * tokens + start + tiles.trip <= length)
        pl.when(plain)(lambda: plain_trip(start))
        pl.when(jnp.logical_not(plain))(lambda: masked_trip(start))

    stage_rows(tokens - ROWS)
    place()
    trips(tiles, plain_trip if column_ref is None else trip, reverse=True)

    @pl.when((number == count - 1) & (jax.lax.rem(row, share) == share - 1))
    def _():
        factor = 0.5 if options.activation == "silu" else 1.0
        for g in range(groups):
            for w in range(width + 1):
                total = jnp.sum(refs["sums"][g, w], axis=0, keepdims=True)
                refs["dtaps"][w : w + 1, lanes(g)] = factor * total


def conv_backward(
    inputs: Inputs, dy: Float[Array, "B T C"], options: Options, *, interpret=False, tiles: Tiles | None = None,
) -> tuple[Float[Array, "B T C"], Float[Array, "M R C"]]:  # fmt: skip
    """The gradients of x, in its dtype, and of taps and bias, float32: sums over tokens and each group's batch rows.
    `tiles` says what a step takes at most."""
    batch, length, total = inputs.x.shape
    tiles = (tiles or TILES).fit(inputs.x)
    count, groups, width = tiles.count(length), tiles.channels // LANES, options.width
    scalars, arrays = common_arrays(inputs, options, tiles, lambda t: count - 1 - t, width - 1)
    arrays["dy"] = (dy, *arrays["x"][1:])
    if count > 1:
        each = tiles.tokens // BEFORE

        def before(c, b, t):
            return b, jnp.maximum((count - 1 - t) * each - 1, 0), c

        arrays["before"] = (inputs.x, (None, BEFORE, tiles.channels), before)
    outputs = {
        "dx": (result(inputs.x.shape, inputs.x.dtype, inputs.x), *arrays["x"][1:]),
        "dtaps": (result(inputs.taps.shape, jnp.float32, inputs.taps), *arrays["taps"][1:]),
    }
    scratch = {name: pltpu.VMEM((groups, HALO + tiles.tokens, LANES), jnp.float32) for name in ("xs", "ds")}
    scratch["sums"] = pltpu.VMEM((groups, width + 1, 8, LANES), jnp.float32)
    if inputs.bits is not None or length % tiles.tokens:
        scratch["column"] = pltpu.VMEM((tiles.tokens + HALO, LANES), jnp.int32)
    grid = (total // tiles.channels, batch, count)
    share = batch // inputs.taps.shape[0]
    call = Call(scalars, arrays, outputs, scratch)
    dx, dtaps = call.run(lambda refs: _step(refs, options, tiles, length, share), "conv_backward", grid, interpret)
    return dx, dtaps
