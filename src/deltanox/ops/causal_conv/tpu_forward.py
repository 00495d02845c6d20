r"""The forward kernel: one pass over [B T C] as it lies, a tile of tokens and a block of channels a step.

Tiles of a row follow one another, and the last tokens of one are carried to the next in the scratch. With h half of the
sum before the activation, SiLU is h + h tanh h: one transcendental, and its absolute error is a few ulps of h.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from .tpu_common import (
    HALO,
    LANES,
    ROWS,
    Call,
    Inputs,
    Options,
    Tiles,
    begin,
    columns,
    combine,
    common_arrays,
    has,
    in_pairs,
    inputs_of,
    lanes,
    place_past,
    read_taps,
    stage,
)  # fmt: skip


def _step(refs: dict, options: Options, tokens: int, rows: int):
    """One tile."""
    x_ref, y_ref, xs_ref = refs["x"], refs["y"], refs["xs"]
    row, tile, tiles = pl.program_id(1), pl.program_id(2), pl.num_programs(2)
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

    def loop(body):
        def at(i, _):
            body(pl.multiple_of(i * rows, rows))
            return 0

        jax.lax.fori_loop(0, tokens // rows, at, 0)

    def stage_all(start):
        for pair in pairs:
            stage(x_ref, xs_ref, pair, start, rows, HALO)

    def outputs(start, masked: bool):
        bits = refs["column"][pl.ds(start, rows), :] if masked else None
        for pair in pairs:
            ys = []
            for g in pair:
                y = combine(inputs_of(xs_ref, g, start, rows, bits, options.width), read_taps(refs["taps"], g, options))
                if options.activation == "silu":
                    y = y + y * jnp.tanh(y)
                ys.append(jnp.where(has(bits, 0), y, 0) if masked else y)
            y_ref[pl.ds(start, rows), lanes(pair[0], len(pair))] = jnp.concatenate(ys, axis=1).astype(y_ref.dtype)

    def plain_body(start):
        stage_all(start)
        outputs(start, False)

    if "bits" not in refs:
        loop(plain_body)
        return
    plain = refs["plain"][row * tiles + tile]

    @pl.when(plain == 1)
    def _():
        place()
        loop(plain_body)

    @pl.when(plain == 0)
    def _():
        columns(refs["bits"], refs["column"])
        loop(stage_all)
        place()
        loop(lambda start: outputs(start, True))


def conv_forward(
    inputs: Inputs, options: Options, *, interpret=False, tokens: int = 1024, channels: int = 1024, rows: int = ROWS
) -> Float[Array, "B T C"]:
    """The outputs, in x's dtype. `tokens` × `channels` is at most a step's tile, `rows` how many tokens a trip of the
    loop inside has."""
    batch, length, _ = inputs.x.shape
    tiles = Tiles.of(inputs.x, tokens, channels)
    scalars, arrays = common_arrays(inputs, options, tiles, lambda t: t, 0)
    outputs = {"y": (jax.ShapeDtypeStruct(inputs.x.shape, inputs.x.dtype), *arrays["x"][1:])}
    scratch = {"xs": pltpu.VMEM((tiles.channels // LANES, HALO + tiles.tokens, LANES), jnp.float32)}
    if inputs.bits is not None:
        scratch["column"] = pltpu.VMEM((tiles.tokens, LANES), jnp.int32)
    grid = (inputs.x.shape[2] // tiles.channels, batch, tiles.count(length))
    call = Call(scalars, arrays, outputs, scratch)
    (y,) = call.run(lambda refs: _step(refs, options, tiles.tokens, rows), "conv_forward", grid, interpret)
    return y
