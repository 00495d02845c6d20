"""Products of row blocks with the matrix of each block's group, and the moves of rows to blocks and back, which fold a
batch into the blocks.

`jax.lax.ragged_dot` wants its rows sorted by group, cannot be mapped over a batch that shares the matrices, and on a
CPU multiplies every row with every matrix. Here rows come in blocks that belong to one group each, in any order. So a
batch (`jax.vmap` of a layer) is only more blocks, the gradient of shared matrices is summed over the batch while it is
computed, and a CPU does no more work than there are blocks. Both products are bilinear and each other's transposes,
which gives forward mode, reverse mode and derivatives of any order. So are moves: where it is known which rows a row
came from, the transpose of a gather is a gather, and not the scatter that JAX makes of it (libtpu 0.0.52 aborts on one
into a single token, and adds in the rows' dtype).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float, Int

from ._dtypes import accumulator
from ._manual import alike, constants

_ACCELERATORS = ("tpu", "cuda", "rocm")


def block_dot(
    x: Float[Array, "G R in"], matrices: Float[Array, "E O I"], group: Int[Array, "G"], *, flip: bool = False
) -> Float[Array, "G R out"]:
    """y_g = x_g M[group_g]ᵀ, or x_g M[group_g] with `flip` (x's features are I and y's O, or the reverse); zero where
    group_g ≥ E."""
    return _block_dot(*alike((x, matrices, group)), flip=flip)


def block_outer(
    a: Float[Array, "G R O"], b: Float[Array, "G R I"], group: Int[Array, "G"], *, num_groups: int
) -> Float[Array, "E O I"]:
    """M_e = Σ over the blocks g of group e of a_gᵀ b_g; blocks with group_g ≥ E are left out."""
    return _block_outer(*alike((a, b, group)), num_groups=num_groups)


def move_rows(x: Float[Array, "N D"], index: Int[Array, "M j"], back: Int[Array, "N i"]) -> Float[Array, "M D"]:
    """y_m = Σ_j x[index_mj], summed in float32, nothing for an index of N or above.

    `back` is the same relation from the other side: m stands in back_n as often as n in index_m (M and above for
    nothing).
    """
    return _move_rows(*alike((x, index, back)))


@partial(jax.jit, static_argnames="flip")
def _block_dot(x, matrices, group, *, flip):
    return _dot_p.bind(x, matrices, group, flip=flip)


@partial(jax.jit, static_argnames="num_groups")
def _block_outer(a, b, group, *, num_groups):
    return _outer_p.bind(a, b, group, num_groups=num_groups)


@jax.jit
def _move_rows(x, index, back):
    return _move_p.bind(x, index, back)


_dot_p, _outer_p, _move_p = Primitive("block_dot"), Primitive("block_outer"), Primitive("move_rows")
_dot_p.def_impl(_block_dot)
_outer_p.def_impl(_block_outer)
_move_p.def_impl(_move_rows)


@_dot_p.def_abstract_eval
def _(x, matrices, group, *, flip):
    blocks, rows, _ = x.shape
    return x.update(shape=(blocks, rows, matrices.shape[2 if flip else 1]), weak_type=False)


@_outer_p.def_abstract_eval
def _(a, b, group, *, num_groups):
    return a.update(shape=(num_groups, a.shape[-1], b.shape[-1]), weak_type=False)


@_move_p.def_abstract_eval
def _(x, index, back):
    return x.update(shape=(index.shape[0], x.shape[1]), weak_type=False)


def _take(x, index, back):
    del back
    y = x.at[index].get(mode="fill", fill_value=0)
    if index.shape[1] == 1:
        return y[:, 0]
    return jnp.sum(y.astype(accumulator(x.dtype)), axis=1).astype(x.dtype)


mlir.register_lowering(_move_p, mlir.lower_fun(_take, multiple_results=False))


# Computed block by block: CPU and anything unknown --------------------


def _dot_loop(x, matrices, group, *, flip):
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


def _outer_loop(a, b, group, *, num_groups):
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


def _sorted_rows(group, num_groups, rows):
    order = jnp.argsort(group)
    sizes = rows * jnp.sum(group[:, None] == jnp.arange(num_groups, dtype=group.dtype)[None], axis=0, dtype=jnp.int32)
    return order, sizes


def _dot_ragged(x, matrices, group, *, flip):
    blocks, rows, size = x.shape
    order, sizes = _sorted_rows(group, matrices.shape[0], rows)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((1,), (1 if flip else 2,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=[0],
    )
    y = jax.lax.ragged_dot_general(
        x[order].reshape(blocks * rows, size), matrices, sizes, dims, preferred_element_type=accumulator(x.dtype)
    )
    y = y.astype(x.dtype).reshape(blocks, rows, -1)[jnp.argsort(order)]
    # rows after the last group's hold whatever the platform left there
    return jnp.where((group < matrices.shape[0])[:, None, None], y, jnp.zeros((), x.dtype))


def _outer_ragged(a, b, group, *, num_groups):
    blocks, rows = a.shape[:2]
    order, sizes = _sorted_rows(group, num_groups, rows)
    dims = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    a, b = (z[order].reshape(blocks * rows, -1) for z in (a, b))
    return jax.lax.ragged_dot_general(a, b, sizes, dims, preferred_element_type=accumulator(a.dtype)).astype(a.dtype)


mlir.register_lowering(_dot_p, mlir.lower_fun(_dot_loop, multiple_results=False))
mlir.register_lowering(_outer_p, mlir.lower_fun(_outer_loop, multiple_results=False))
for _platform in _ACCELERATORS:
    mlir.register_lowering(_dot_p, mlir.lower_fun(_dot_ragged, multiple_results=False), platform=_platform)
    mlir.register_lowering(_outer_p, mlir.lower_fun(_outer_ragged, multiple_results=False), platform=_platform)


# Derivatives: each product is linear in either factor, the transposes are the two products again; so it is with moves
# --------------------


def _move_jvp(primals, tangents):
    x, index, back = primals
    return move_rows(x, index, back), move_rows(tangents[0], index, back)


def _move_transpose(ct, x, index, back):
    del x
    return None if isinstance(ct, ad.Zero) else move_rows(ct, back, index), None, None


ad.primitive_jvps[_move_p] = _move_jvp
ad.primitive_transposes[_move_p] = _move_transpose


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


def _dot_transpose(ct, x, matrices, group, *, flip):
    if isinstance(ct, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(x):
        return block_dot(ct, matrices, group, flip=not flip), None, None
    num_groups = matrices.aval.shape[0]
    left, right = (x, ct) if flip else (ct, x)
    return None, block_outer(left, right, group, num_groups=num_groups), None


def _outer_transpose(ct, a, b, group, *, num_groups):
    if isinstance(ct, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(a):
        return block_dot(b, ct, group), None, None
    return None, block_dot(a, ct, group, flip=True), None


ad.primitive_transposes[_dot_p] = _dot_transpose
ad.primitive_transposes[_outer_p] = _outer_transpose


# Batches: more blocks, and more groups where the matrices differ as well --------------------


def _in_front(size, x, axis):
    if axis is None:
        return jnp.broadcast_to(x[None], (size, *x.shape))
    return jnp.moveaxis(x, axis, 0)


def _fold(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _numbers_of_each(number, count):
    """0 ... B·count - 1 for numbers [B ...] below `count` that aren't shared; B·count for none."""
    size = number.shape[0]
    first = count * jnp.arange(size, dtype=number.dtype).reshape(size, *[1] * (number.ndim - 1))
    return _fold(jnp.where(number < count, number + first, count * size))


def _batch_size(args, axes):
    return next(x.shape[axis] for x, axis in zip(args, axes) if axis is not None)


def _dot_batch(args, axes, *, flip):
    size = _batch_size(args, axes)
    x, matrices, group = args
    x, group = _in_front(size, x, axes[0]), _in_front(size, group, axes[2])
    if axes[1] is None:
        group = _fold(group)
    else:
        matrices = jnp.moveaxis(matrices, axes[1], 0)
        group = _numbers_of_each(group, matrices.shape[1])
        matrices = _fold(matrices)
    y = block_dot(_fold(x), matrices, group, flip=flip)
    return y.reshape(*x.shape[:2], *y.shape[1:]), 0


def _outer_batch(args, axes, *, num_groups):
    size = _batch_size(args, axes)
    a, b, group = (_in_front(size, x, axis) for x, axis in zip(args, axes))
    out = block_outer(_fold(a), _fold(b), _numbers_of_each(group, num_groups), num_groups=num_groups * size)
    return out.reshape(size, num_groups, *out.shape[1:]), 0


def _move_batch(args, axes):
    size = _batch_size(args, axes)
    x, index, back = (_in_front(size, x, axis) for x, axis in zip(args, axes))
    y = move_rows(_fold(x), _numbers_of_each(index, x.shape[1]), _numbers_of_each(back, index.shape[1]))
    return y.reshape(size, -1, x.shape[2]), 0


batching.primitive_batchers[_move_p] = _move_batch
batching.primitive_batchers[_dot_p] = _dot_batch
batching.primitive_batchers[_outer_p] = _outer_batch
