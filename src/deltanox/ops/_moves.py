"""Rows gathered from rows, where it is known which rows a row came from.

The transpose of such a gather is a gather too, and not the scatter that JAX makes of it: a TPU scatters row by row, in
the rows' dtype, and libtpu 0.0.52 aborts on a scatter into a single row.
"""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from ._compiled import implement
from ._dtypes import accumulator
from ._grouped import batch_size, fold, in_front, numbers_of_each
from ._manual import alike


def move_rows(x: Float[Array, "N D"], index: Int[Array, "M j"], back: Int[Array, "N i"]) -> Float[Array, "M D"]:
    """y_m = Σ_j x[index_mj], summed in float32, nothing for an index of N or above.

    `back` is the same relation from the other side: m stands in back_n as often as n in index_m (M and above for
    nothing).
    """
    return _move_rows(*alike((x, index, back)))


@jax.jit
def _move_rows(x, index, back):
    return _move_p.bind(x, index, back)


_move_p = Primitive("move_rows")
implement(_move_p)


@_move_p.def_abstract_eval
def _(x, index, back):
    return x.update(shape=(index.shape[0], x.shape[1]), weak_type=False)


def _take(x, index, back):
    del back

    def row(j):
        return x.at[index[:, j]].get(mode="fill", fill_value=0)

    if index.shape[1] == 1:
        return row(0)
    # one after the other: all j rows at once would be the largest array of a backward pass
    total = row(0).astype(accumulator(x.dtype))
    for j in range(1, index.shape[1]):
        total = total + row(j).astype(total.dtype)
    return total.astype(x.dtype)


mlir.register_lowering(_move_p, mlir.lower_fun(_take, multiple_results=False))


def _move_jvp(primals, tangents):
    x, index, back = primals
    return move_rows(x, index, back), move_rows(tangents[0], index, back)


def _move_transpose(ct, x, index, back):
    del x
    return None if isinstance(ct, ad.Zero) else move_rows(ct, back, index), None, None


ad.primitive_jvps[_move_p] = _move_jvp
ad.primitive_transposes[_move_p] = _move_transpose


def _move_batch(args, axes):
    size = batch_size(args, axes)
    x, index, back = (in_front(size, x, axis) for x, axis in zip(args, axes))
    y = move_rows(fold(x), numbers_of_each(index, x.shape[1]), numbers_of_each(back, index.shape[1]))
    return y.reshape(size, -1, x.shape[2]), 0


batching.primitive_batchers[_move_p] = _move_batch
