"""Columns of one array in HBM that a kernel reads, and overwrites with their cotangents.

Pallas moves blocks for a kernel, but an array that is passed three times, for q, k and v, cannot also be the result:
XLA would copy it first. So the array stays in HBM, and each step starts the copies of the next step's columns before
it works on its own, and writes its own back while the next one works. A step reads tokens that no other step writes.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .tiling import LANES
from .tpu_common import Columns

SUBLANES = 8


def in_one_array(parts: tuple[tuple[Columns, int], ...], length: int) -> bool:
    """Whether all parts (columns, and how many heads of them a step takes) lie in one array, where copies can reach
    them: in HBM it has tiles of 8 tokens and 128 columns."""
    array = parts[0][0].array
    aligned = all(x.start % LANES == 0 and count * x.size % LANES == 0 for x, count in parts)
    return aligned and length % SUBLANES == 0 and all(x.array is array for x, _ in parts)


class Moves(NamedTuple):
    """The copies of a grid (batch row, heads, tiles) whose last axis runs from the last tile of tokens to the first."""

    parts: tuple[tuple[Columns, int], ...]
    tile: int
    length: int

    def scratch(self, dtype) -> list:
        """Two buffers a part, in and out: one is worked on while the other one travels."""
        buffers = [pltpu.VMEM((2, self.tile, count * x.size), dtype) for x, count in self.parts]
        return [*buffers, *buffers, *[pltpu.SemaphoreType.DMA((2, len(self.parts)))] * 2]

    def run(self, body: Callable, source, target, scratch):
        """`body(inputs, outputs)` with references [tile, columns], a list of each."""
        count = len(self.parts)
        ins, outs, (arrived, left) = scratch[:count], scratch[count : 2 * count], scratch[2 * count :]
        row, group, step, steps = (*(pl.program_id(i) for i in range(3)), pl.num_programs(2))
        short = self.length % self.tile

        def slot(step):
            return jax.lax.rem(step, 2)

        def each(step, act: Callable, *, inward: bool):
            """Act on the copies of a step, of which the first may have fewer tokens."""

            def copies(tokens: int):
                start = pl.multiple_of((steps - 1 - step) * self.tile, self.tile)
                for i, (x, heads) in enumerate(self.parts):
                    width = heads * x.size
                    first = pl.multiple_of(x.start + group * width, LANES)
                    outside = (source if inward else target).at[row, pl.ds(start, tokens), pl.ds(first, width)]
                    inside = (ins if inward else outs)[i].at[slot(step), pl.ds(0, tokens)]
                    ends = (outside, inside) if inward else (inside, outside)
                    act(pltpu.make_async_copy(*ends, (arrived if inward else left).at[slot(step), i]))

            if short:
                pl.when(step == 0)(lambda: copies(short))
                pl.when(step > 0)(lambda: copies(self.tile))
            else:
                copies(self.tile)

        def start(copy):
            copy.start()

        def wait(copy):
            copy.wait()

        pl.when(step == 0)(lambda: each(step, start, inward=True))
        pl.when(step + 1 < steps)(lambda: each(step + 1, start, inward=True))
        pl.when(step > 1)(lambda: each(step - 2, wait, inward=False))
        each(step, wait, inward=True)
        body([x.at[slot(step)] for x in ins], [x.at[slot(step)] for x in outs])
        each(step, start, inward=False)

        @pl.when(step == steps - 1)
        def _():
            pl.when(step > 0)(lambda: each(step - 1, wait, inward=False))
            each(step, wait, inward=False)
