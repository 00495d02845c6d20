"""Products of row blocks with the matrix of each block's group, which fold a batch into the blocks.

`jax.lax.ragged_dot` wants its rows sorted by group, cannot be mapped over a batch that shares the matrices, and on a
CPU multiplies every row with every matrix. Here rows come in blocks that belong to one group each, in any order. So a
batch (`jax.vmap` of a layer) is only more blocks, the gradient of shared matrices is summed over the batch while it is
computed, and a CPU does no more work than there are blocks. Both products are bilinear and each other's transposes,
which gives forward mode, reverse mode and derivatives of any order.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from ._compiled import implement
from ._dtypes import accumulator
from ._manual import alike, constants

_ACCELERATORS = ("tpu", "cuda", "rocm")


def block_dot(
    x: Float[Array, "G R in"],
    matrices: Float[Array, "E O I"],
    group: Int[Array, "G"],
    *,
    flip: bool = False,
    ordered: bool = False,
) -> Float[Array, "G R out"]:
    """y_g = x_g M[group_g]ᵀ, or x_g M[group_g] with `flip` (x's features are I and y's O, or the reverse); zero where
    group_g ≥ E. `ordered` says that groups don't fall: rows are then not moved for `ragged_dot`."""
    return _block_dot(*alike((x, matrices, group)), flip=flip, ordered=ordered)


def block_outer(
    a: Float[Array, "G R O"],
    b: Float[Array, "G R I"],
    group: Int[Array, "G"],
    *,
    num_groups: int,
    ordered: bool = False,
) -> Float[Array, "E O I"]:
    """M_e = Σ over the blocks g of group e of a_gᵀ b_g; blocks with group_g ≥ E are left out."""
    return _block_outer(*alike((a, b, group)), num_groups=num_groups, ordered=ordered)


@partial(jax.jit, static_argnames=("flip", "ordered"))
def _block_dot(x, matrices, group, *, flip, ordered):
    return _dot_p.bind(x, matrices, group, flip=flip, ordered=ordered)


@partial(jax.jit, static_argnames=("num_groups", "ordered"))
def _block_outer(a, b, group, *, num_groups, ordered):
    return _outer_p.bind(a, b, group, num_groups=num_groups, ordered=ordered)


_dot_p, _outer_p = Primitive("block_dot"), Primitive("block_outer")
implement(_dot_p, "flip", "ordered")
implement(_outer_p, "num_groups", "ordered")


@_dot_p.def_abstract_eval
def _(x, matrices, group, *, flip, ordered):
    blocks, rows, _ = x.shape
    return x.update(shape=(blocks, rows, matrices.shape[2 if flip else 1]), weak_type=False)


@_outer_p.def_abstract_eval
def _(a, b, group, *, num_groups, ordered):
    return a.update(shape=(num_groups, a.shape[-1], b.shape[-1]), weak_type=False)


# Computed block by block: CPU and anything unknown --------------------


def _dot_loop(x, matrices, group, *, flip, ordered):
    del ordered
    dims = (((1,), (0 if flip else 1,)), ((), ()))
    out_size = matrices.shape[2 if flip else 1]

    def zeros(*shape):
        return constants(jnp.zeros(shape, x.dtype), x)

    def one(g, out):
        rows = jax.lax.dynamic_index_in_dim(x, g, 0, keepdims=False)

        def product():
            matrix = jax.lax.dynamic_index_in_dim(matrices, group[g], 0, keepdims=False)
            return jax.lax.dot_general(rows, matrix, dims, preferred_element_type=accumulator(x.dtype)).astype(x.dtype)

        y = jax.lax.cond(group[g] < matrices.shape[0], product, lambda: zeros(x.shape[1], out_size))
        return jax.lax.dynamic_update_index_in_dim(out, y, g, 0)

    return jax.lax.fori_loop(0, x.shape[0], one, zeros(*x.shape[:2], out_size))


def _outer_loop(a, b, group, *, num_groups, ordered):
    del ordered
    wide = accumulator(a.dtype)

    def one(g, out):
        def add():
            left, right = (jax.lax.dynamic_index_in_dim(z, g, 0, keepdims=False) for z in (a, b))
            more = jax.lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=wide)
            return jax.lax.dynamic_index_in_dim(out, group[g], 0, keepdims=False) + more

        # a block of no group rewrites the last matrix as it is
        keep = num_groups - 1
        y = jax.lax.cond(group[g] < num_groups, add, lambda: out[keep])
        return jax.lax.dynamic_update_index_in_dim(out, y, jnp.minimum(group[g], keep), 0)

    zeros = constants(jnp.zeros((num_groups, a.shape[-1], b.shape[-1]), wide), a)
    return jax.lax.fori_loop(0, a.shape[0], one, zeros).astype(a.dtype)


# Computed by ragged_dot on blocks sorted by group: TPU and GPU --------------------


def _sizes(group, num_groups, rows):
    return rows * jnp.sum(group[:, None] == jnp.arange(num_groups, dtype=group.dtype)[None], axis=0, dtype=jnp.int32)


def _rows(x, order):
    return (x if order is None else x[order]).reshape(x.shape[0] * x.shape[1], x.shape[2])


def _dot_ragged(x, matrices, group, *, flip, ordered=False):
    blocks, rows = x.shape[:2]
    order = None if ordered else jnp.argsort(group)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if flip else 2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = jax.lax.ragged_dot_general(
        _rows(x, order), matrices, _sizes(group, matrices.shape[0], rows), dims,
        preferred_element_type=accumulator(x.dtype),
    )  # fmt: skip
    y = y.astype(x.dtype).reshape(blocks, rows, -1)
    y = y if order is None else y[jnp.argsort(order)]
    # rows after the last group's hold whatever the platform left there
    return jnp.where((group < matrices.shape[0])[:, None, None], y, jnp.zeros((), x.dtype))


def _outer_ragged(a, b, group, *, num_groups, ordered=False):
    order = None if ordered else jnp.argsort(group)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    sizes = _sizes(group, num_groups, a.shape[1])
    wide = accumulator(a.dtype)
    y = jax.lax.ragged_dot_general(_rows(a, order), _rows(b, order), sizes, dims, preferred_element_type=wide)
    return y.astype(a.dtype)


mlir.register_lowering(_dot_p, mlir.lower_fun(_dot_loop, multiple_results=False))
mlir.register_lowering(_outer_p, mlir.lower_fun(_outer_loop, multiple_results=False))
for _platform in _ACCELERATORS:
    mlir.register_lowering(_dot_p, mlir.lower_fun(_dot_ragged, multiple_results=False), platform=_platform)
    mlir.register_lowering(_outer_p, mlir.lower_fun(_outer_ragged, multiple_results=False), platform=_platform)


# Derivatives: each product is linear in either factor, the transposes are the two products again --------------------


def _bilinear_jvp(product, primals, tangents, **options):
    left, right, group = primals
    d_left, d_right, _ = tangents
    terms = []
    if not isinstance(d_left, ad.Zero):
        terms.append(product(d_left, right, group, **options))
    if not isinstance(d_right, ad.Zero):
        terms.append(product(left, d_right, group, **options))
    # the rule is called only where at least one tangent isn't zero
    return product(left, right, group, **options), sum(terms[1:], terms[0])


ad.primitive_jvps[_dot_p] = partial(_bilinear_jvp, block_dot)
ad.primitive_jvps[_outer_p] = partial(_bilinear_jvp, block_outer)


def _dot_transpose(ct, x, matrices, group, *, flip, ordered):
    if isinstance(ct, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(x):
        return block_dot(ct, matrices, group, flip=not flip, ordered=ordered), None, None
    num_groups = matrices.aval.shape[0]
    left, right = (x, ct) if flip else (ct, x)
    return None, block_outer(left, right, group, num_groups=num_groups, ordered=ordered), None


def _outer_transpose(ct, a, b, group, *, num_groups, ordered):
    if isinstance(ct, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(a):
        return block_dot(b, ct, group, ordered=ordered), None, None
    return None, block_dot(a, ct, group, flip=True, ordered=ordered), None


ad.primitive_transposes[_dot_p] = _dot_transpose
ad.primitive_transposes[_outer_p] = _outer_transpose


# Batches: more blocks, and more groups where the matrices differ as well --------------------


def in_front(size, x, axis):
    if axis is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def fold(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def numbers_of_each(number, count):
    """0 ... B·count - 1 for numbers [B ...] below `count` that aren't shared; B·count for none."""
    size = number.shape[0]
    first = count * jnp.arange(size, dtype=number.dtype).reshape(size, *[1] * (number.ndim - 1))
    return fold(jnp.where(number < count, number + first, count * size))


def batch_size(args, axes):
    return next(x.shape[axis] for x, axis in zip(args, axes) if axis is not None)


def _dot_batch(args, axes, *, flip, ordered):
    size = batch_size(args, axes)
    x, matrices, group = args
    x, group = in_front(size, x, axes[0]), in_front(size, group, axes[2])
    if axes[1] is None:
        group = fold(group)
    else:
        matrices = jnp.moveaxis(matrices, axes[1], 0)
        group = numbers_of_each(group, matrices.shape[1])
        matrices = fold(matrices)
    y = block_dot(fold(x), matrices, group, flip=flip, ordered=ordered and size == 1)
    return y.reshape(*x.shape[:2], *y.shape[1:]), 0


def _outer_batch(args, axes, *, num_groups, ordered):
    size = batch_size(args, axes)
    a, b, group = (in_front(size, x, axis) for x, axis in zip(args, axes))
    group = numbers_of_each(group, num_groups)
    ordered = ordered and size == 1
    out = block_outer(fold(a), fold(b), group, num_groups=num_groups * size, ordered=ordered)
    return out.reshape(size, num_groups, *out.shape[1:]), 0


batching.primitive_batchers[_dot_p] = _dot_batch
batching.primitive_batchers[_outer_p] = _outer_batch
