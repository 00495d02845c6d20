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
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from ._derivatives import once_differentiable
from ._dtypes import inverse_root
from ._kernels import on_engine
from ._manual import alike, result
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
    return pl.pallas_call(
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
    return pl.pallas_call(
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm_projection(options: Options, x, z, weight, projection):
    return dot(_on_engine(options, _by_heads, _forward, x, z, weight), projection)


def _once(options: Options):
    return once_differentiable("pallas" if options.engine == "pallas" else "xla", "use implementation='chunked'")


def _vjp_forward(options: Options, x, z, weight, projection):
    y = _once(options)(lambda *arrays: _on_engine(options, _by_heads, _forward, *arrays))(x, z, weight)
    return dot(y, projection), (x, z, weight, projection)


def _vjp_backward(options: Options, kept, out_bar):
    def plain(x, z, weight, dy, *, options):
        y, pull = jax.vjp(functools.partial(_by_heads, options=options), x, z, weight)
        dx, dz, dweight = pull(dy)
        return dx, dz, y, dweight

    def kernel(*arrays, **settings):
        return tuple(_backward(*arrays, **settings))

    def backward(x, z, weight, projection, out_bar):
        dy = jax.lax.dot_general(out_bar, projection, (((out_bar.ndim - 1,), (0,)), ((), ())))
        dx, dz, y, dweight = _on_engine(options, plain, kernel, x, z, weight, dy)
        # before anything goes on with dx: y's memory is free by then
        return jax.lax.optimization_barrier((dx, dz, dweight, weight_gradient(out_bar, y, projection)))

    return _once(options)(backward)(*kept, out_bar)


_norm_projection.defvjp(_vjp_forward, _vjp_backward)


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
    out: Any = _norm_projection(Options(eps, gate, implementation), x[None], z[None], weight[None, None], projection)
    return out[0]
