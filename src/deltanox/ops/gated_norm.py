"""The gated norm behind the delta rule and the projection after it, on merged heads: for a TPU a kernel in each
direction, elsewhere the formula.

XLA's code for a norm over 128 of 8,192 merged features first lays the array out anew by heads, in float32: at 65,536
tokens 4.3 GB for 1.07 GB. The kernels read and write the merged array. With n = x / √(mean(x²) + ε) and
u = weight · act(z) · dy:

    y = n · weight · act(z)        dx = (u − n · mean(u n)) / √(mean(x²) + ε)        dz = n · weight · act'(z) · dy
    out = y Wᵀ                     dy = dout W                                       dW = doutᵀ y

The backward kernel makes y again, for dW: it is not kept from one pass to the other. y, dx and dz take the memory of x,
dy and z.
"""

import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from ._compiled import compiled, implement
from ._derivatives import no_second_derivative, once_differentiable
from ._dtypes import inverse_root
from ._kernels import launch, on_engine
from ._manual import alike, constants, result
from ._product import dot, weight_gradient

ROWS, COLUMNS = 256, 1024  # of a block
LANES = 128


class Options(NamedTuple):
    """What is compiled in."""

    eps: float
    gate: Literal["silu", "sigmoid"]
    engine: Literal["auto", "pallas"]


def formula(x: Float[Array, "*B V"], z: Float[Array, "*B V"], weight: Float[Array, "... V"], *, eps: float, gate: str):
    """y, in the dtype of its arrays, whose axes broadcast."""
    root = inverse_root(jnp.mean(jnp.square(x), axis=-1, keepdims=True), eps)
    act = jax.nn.sigmoid(z)
    if gate == "silu":
        act = z * act
    return x * root * weight * act


def takes(x: Float[Array, "T HV"], size: int) -> bool:
    """Whether the kernels can take merged heads of `size` features."""
    return size % LANES == 0 and x.dtype in (jnp.bfloat16, jnp.float32) and x.shape[0] > 0


def _forward_kernel(x_ref, z_ref, weight_ref, y_ref, *, size: int, eps: float, gate: str):
    weight = weight_ref[0]
    for start in range(0, x_ref.shape[1], size):
        head = slice(start, start + size)
        x, z = (ref[:, head].astype(jnp.float32) for ref in (x_ref, z_ref))
        y_ref[:, head] = formula(x, z, weight, eps=eps, gate=gate).astype(y_ref.dtype)


def _backward_kernel(
    x_ref, z_ref, weight_ref, dy_ref, dx_ref, dz_ref, y_ref, dweight_ref, *, size: int, eps: float, gate: str,
    length: int,
):  # fmt: skip
    @pl.when((pl.program_id(1) == 0) & (pl.program_id(2) == 0))
    def _():
        dweight_ref[...] = jnp.zeros(dweight_ref.shape, jnp.float32)

    weight = weight_ref[0]
    rows = x_ref.shape[0]
    inside = jax.lax.broadcasted_iota(jnp.int32, (rows, size), 0) + pl.program_id(2) * rows < length
    total = jnp.zeros((rows, size), jnp.float32)
    for start in range(0, x_ref.shape[1], size):
        head = slice(start, start + size)
        x, z, dy = (ref[:, head].astype(jnp.float32) for ref in (x_ref, z_ref, dy_ref))
        root = inverse_root(jnp.mean(x * x, axis=1, keepdims=True), eps)
        sigmoid = jax.nn.sigmoid(z)
        act, slope = sigmoid, sigmoid * (1 - sigmoid)
        if gate == "silu":
            act, slope = z * sigmoid, sigmoid * (1 + z * (1 - sigmoid))
        n = x * root
        gated = act * dy
        u = weight * gated
        total += jnp.where(inside, n * gated, 0.0)
        dx_ref[:, head] = (root * (u - n * jnp.mean(u * n, axis=1, keepdims=True))).astype(dx_ref.dtype)
        scaled = n * weight
        dz_ref[:, head] = (scaled * slope * dy).astype(dz_ref.dtype)
        y_ref[:, head] = (scaled * act).astype(y_ref.dtype)
    dweight_ref[...] += jnp.sum(total, axis=0, keepdims=True)[None]


class Blocks(NamedTuple):
    """How [B T HV] is cut, for heads of V features."""

    grid: tuple[int, int, int]
    tokens: pl.BlockSpec  # some rows of some whole heads
    weight: pl.BlockSpec  # [1 1 V]


def _blocks(x: Float[Array, "B T HV"], size: int) -> Blocks:
    batch, length, width = x.shape
    columns = max(n for n in range(size, min(width, max(COLUMNS, size)) + 1, size) if width % n == 0)
    rows = min(ROWS, -(-length // 16) * 16)
    return Blocks(
        (batch, width // columns, pl.cdiv(length, rows)),
        pl.BlockSpec((None, rows, columns), lambda b, j, t: (b, t, j)),
        pl.BlockSpec((1, 1, size), lambda b, j, t: (b, 0, 0)),
    )


_PARAMS = pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary", "arbitrary"))


def _forward(x, z, weight, *, options: Options, interpret: Any):
    size = weight.shape[-1]
    grid, tokens, whole = _blocks(x, size)
    return launch(
        functools.partial(_forward_kernel, size=size, eps=options.eps, gate=options.gate),
        grid=grid,
        in_specs=[tokens, tokens, whole],
        out_specs=tokens,
        out_shape=result(x.shape, x.dtype, x),
        compiler_params=_PARAMS,
        interpret=interpret,
        name="gated_norm_forward",
    )(x, z, weight)


def _backward(x, z, weight, dy, *, options: Options, interpret: Any):
    size, length = weight.shape[-1], x.shape[1]
    grid, tokens, whole = _blocks(x, size)
    kernel = functools.partial(_backward_kernel, size=size, eps=options.eps, gate=options.gate, length=length)
    return launch(
        kernel,
        grid=grid,
        in_specs=[tokens, tokens, whole, tokens],
        out_specs=[tokens, tokens, tokens, whole],
        out_shape=[result(a.shape, a.dtype, a) for a in (dy, z, x, weight)],
        # the interpreter cannot alias where blocks reach over the edge
        input_output_aliases={} if interpret and length % min(ROWS, -(-length // 16) * 16) else {3: 0, 1: 1, 0: 2},
        compiler_params=_PARAMS,
        interpret=interpret,
        name="gated_norm_backward",
    )(x, z, weight, dy)


def _by_heads(x, z, weight, *, options: Options):
    """The formula, without a kernel."""
    size, wide = weight.shape[-1], jnp.float32
    heads = (*x.shape[:2], -1, size)
    y = formula(
        x.reshape(heads).astype(wide),
        z.reshape(heads).astype(wide),
        weight[:, :, None],
        eps=options.eps,
        gate=options.gate,
    )
    return y.reshape(x.shape).astype(x.dtype)


def _on_engine(options: Options, plain, kernel, *arrays):
    xla, tpu = (functools.partial(f, options=options) for f in (plain, kernel))
    return on_engine(options.engine, "gated_rms_norm", xla, tpu, *arrays)


def _kernel_forward(
    options: Options, x: Float[Array, "*B T HV"], z: Float[Array, "*B T HV"], weight: Float[Array, " V"]
):
    """y, by the implementation that is asked for."""
    rows = (x.reshape(-1, *x.shape[-2:]), z.reshape(-1, *x.shape[-2:]))
    return _on_engine(options, _by_heads, _forward, *rows, _per_row(weight, rows[0])).reshape(x.shape)


def _per_row(weight: Float[Array, " V"], x: Float[Array, "B T HV"]) -> Float[Array, "B 1 V"]:
    return jnp.broadcast_to(weight, (x.shape[0], 1, weight.shape[0]))


def _gradients(options: Options, x, z, weight, projection, d_out):
    """Gradients of the four arrays: of x and z [*B T HV] row by row, of the weights summed over all rows."""

    def plain(x, z, weight, dy, *, options):
        y, pull = jax.vjp(functools.partial(_by_heads, options=options), x, z, weight)
        dx, dz, dweight = pull(dy)
        return dx, dz, y, dweight

    def kernel(*arrays, **settings):
        return tuple(_backward(*arrays, **settings))

    rows = tuple(a.reshape(-1, *a.shape[-2:]) for a in (x, z, d_out))
    dy = jax.lax.dot_general(rows[2], projection, (((2,), (0,)), ((), ())))
    dx, dz, y, dweight = _on_engine(options, plain, kernel, *rows[:2], _per_row(weight, rows[0]), dy)
    # before anything goes on with dx: y's memory is free by then
    dx, dz, dweight, d_projection = jax.lax.optimization_barrier((dx, dz, dweight, weight_gradient(rows[2], y)))
    return dx.reshape(x.shape), dz.reshape(z.shape), jnp.sum(dweight, (0, 1)), d_projection


@compiled("options")
def _compiled_norm_projection(x, z, weight, projection, *, options: Options):
    return _norm_projection(options, x, z, weight, projection)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _norm_projection(options: Options, x, z, weight, projection):
    return dot(_kernel_forward(options, x, z, weight), projection)


# The derivative is a linear primitive with a transpose of its own, and no `custom_vjp`, for the sake of `jax.vmap`. The
# gradients of the two weights are sums over all rows, and only the order of the transforms tells which rows those are:
# in grad of vmap the mapped axis is summed over, in vmap of grad it is not. A `custom_vjp` sees the same arguments in
# both. Here the map over the forward pass makes more rows of this primitive (`_tangent_batch`), which its transpose
# then sums, while a map over the backward pass finds plain products.


@functools.partial(_norm_projection.defjvp, symbolic_zeros=True)
def _norm_projection_jvp(options: Options, primals, tangents):
    x, z, weight, projection = primals
    y = _guarded(_kernel_forward, options)(x, z, weight)
    zeros = [
        constants(jnp.zeros(p.shape, p.dtype), x) if isinstance(t, SymbolicZero) else t
        for p, t in zip(primals, tangents)
    ]
    return dot(y, projection), _tangent_p.bind(*zeros, *primals, options=options)


def _refusal(options: Options) -> tuple[str, str]:
    return "pallas" if options.engine == "pallas" else "xla", "use implementation='chunked'"


@functools.cache  # one function for all calls: outside `jax.jit` each would compile it again
def _guarded(f, options: Options):
    return once_differentiable(*_refusal(options))(functools.partial(f, options))


def _tangent(*arrays, options: Options):
    """The derivative in forward mode, by the formula. The weights may have axes in front that all arrays share."""

    def value(x, z, weight, projection):
        rows = x.reshape(-1, *x.shape[-2:]), z.reshape(-1, *x.shape[-2:])
        return dot(_by_heads(*rows, _per_row(weight, rows[0]), options=options).reshape(x.shape), projection)

    def tangent(*arrays):
        return jax.jvp(value, arrays[4:], arrays[:4])[1]

    for _ in range(arrays[6].ndim - 1):
        tangent = jax.vmap(tangent)
    return tangent(*arrays)


_tangent_p = Primitive("gated_norm_projection_tangent")
implement(_tangent_p, "options")
_tangent_p.def_abstract_eval(
    lambda *arrays, options: jax.make_jaxpr(functools.partial(_tangent, options=options))(*arrays).out_avals[0]
)
mlir.register_lowering(_tangent_p, mlir.lower_fun(_tangent, multiple_results=False))


def _tangent_jvp(primals, tangents, *, options: Options):
    if not all(isinstance(t, ad.Zero) for t in tangents[4:]):
        raise no_second_derivative(*_refusal(options))
    moved = [ad.instantiate_zeros(t) for t in tangents[:4]]
    return tuple(_tangent_p.bind(*x, *primals[4:], options=options) for x in (primals[:4], moved))


def _tangent_transpose(d_out, *arrays, options: Options):
    if isinstance(d_out, ad.Zero):
        return (None,) * 8
    gradients = _guarded(_gradients, options)
    for _ in range(arrays[6].ndim - 1):
        gradients = jax.vmap(gradients)
    wanted = map(ad.is_undefined_primal, arrays[:4])
    return (*(g if w else None for g, w in zip(gradients(*arrays[4:], d_out), wanted)), *(None,) * 4)


def _tangent_batch(arrays, axes, *, options: Options):
    size = next(x.shape[axis] for x, axis in zip(arrays, axes) if axis is not None)

    def in_front(x, axis):
        return jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)

    weights = (2, 3, 6, 7)
    shared = all(axes[i] is None for i in weights)  # the same weights for all: more rows of one product
    models = arrays[6].ndim - 1  # axes that the weights have already
    moved = []
    for i, (x, axis) in enumerate(zip(arrays, axes)):
        if not (shared and i in weights):
            x = in_front(x, axis)
            x = jnp.moveaxis(x, 0, models) if shared else x
        moved.append(x)
    return _tangent_p.bind(*moved, options=options), models if shared else 0


ad.primitive_jvps[_tangent_p] = _tangent_jvp
ad.primitive_transposes[_tangent_p] = _tangent_transpose
batching.primitive_batchers[_tangent_p] = _tangent_batch


def gated_norm_projection(
    x: Float[Array, "T HV"],
    z: Float[Array, "T HV"],
    weight: Float[Array, " V"],
    projection: Float[Array, "D HV"],
    *,
    eps: float,
    gate: Literal["silu", "sigmoid"],
    implementation: Literal["auto", "pallas"],
) -> Float[Array, "T D"]:
    """Each head's norm times the gate, rounded once to x's dtype, times the projection, which is rounded to it too.

    Float32 inside. `takes` says for which arrays. It has one derivative, in reverse mode.
    """
    arrays = (x, z, weight.astype(jnp.float32), projection.astype(x.dtype))
    x, z, weight, projection = alike(arrays)
    out: Any = _compiled_norm_projection(x, z, weight, projection, options=Options(eps, gate, implementation))
    return out
