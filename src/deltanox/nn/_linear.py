"""Linear layers without bias, drawn as Qwen draws them and applied to whole sequences."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from ..ops._manual import alike
from ..ops._validate import describe, require
from ._lora import LoRALinear

INIT_SCALE = 0.02
"""Standard deviation of every linear, convolution and embedding weight (`initializer_range` of the released
configs)."""


def normal(shape: tuple[int, ...], *, dtype: DTypeLike = jnp.float32, key: PRNGKeyArray) -> Array:
    """N(0, 0.02) values, drawn in float32 and rounded to `dtype` afterwards."""
    return (INIT_SCALE * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def linear(in_size: int, out_size: int, *, dtype: DTypeLike = jnp.float32, key: PRNGKeyArray) -> eqx.nn.Linear:
    """An `eqx.nn.Linear` without bias, `weight` [out_size in_size] ~ N(0, 0.02)."""
    require(
        in_size >= 1 and out_size >= 1,
        f"linear: the sizes must be at least 1, but they are in_size={in_size}, out_size={out_size}",
    )
    # Equinox draws a uniform weight of its own: made abstractly, so that nothing is drawn twice
    skeleton = eqx.filter_eval_shape(eqx.nn.Linear, in_size, out_size, use_bias=False, dtype=dtype, key=key)
    return eqx.tree_at(lambda layer: layer.weight, skeleton, normal((out_size, in_size), dtype=dtype, key=key))


def apply_linear(layer: eqx.nn.Linear | LoRALinear, x: Float[Array, "*B I"]) -> Float[Array, "*B O"]:
    """y = x Wᵀ over the last axis, in x's dtype.

    One product for the whole sequence, with the tokens in rows: no transpose of the weight or of the tokens is made.

    **Arguments:** `layer`: a linear layer without bias; `x`: its inputs along the last axis.

    **Returns:** the outputs along the last axis, in x's dtype (the weight is rounded to it).

    **Raises:** `ValueError` if the last axis isn't the layer's input size.
    """
    weight = layer.weight
    require(
        x.shape[-1] == weight.shape[1],
        f"linear: the last axis of `x` must be the layer's input size {weight.shape[1]}, but x is {describe(x)}: "
        f"build the layer with in_size={x.shape[-1]} or give it features of its own size",
    )
    return _dot(*alike((x, weight.astype(x.dtype))))


def _product(x, weight):
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


@jax.custom_jvp
def _dot(x, weight):
    return _product(x, weight)


@functools.partial(_dot.defjvp, symbolic_zeros=True)
def _dot_jvp(primals, tangents):
    (x, weight), (dx, d_weight) = primals, tangents
    y = _dot(x, weight)
    # a factor that isn't differentiated (a frozen weight) has no term
    terms = [] if isinstance(dx, SymbolicZero) else [_dot(dx, weight)]
    terms += [] if isinstance(d_weight, SymbolicZero) else [_term_p.bind(x, d_weight)]
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


# The weight's term of the product rule is a primitive of its own for the sake of its transpose: the weight's gradient
# is ȳᵀ x over all rows of all sequences. On a CPU that has to be one product of two matrices that lie in memory: with
# the batch as an axis of its own, or ȳ not yet written, XLA gathers ȳᵀ column by column, fused with whatever made ȳ.


def _weight_gradient(y_bar: Float[Array, "*B O"], x: Float[Array, "*B I"]) -> Float[Array, "O I"]:
    rows = tuple(range(x.ndim - 1))

    def on_cpu(y_bar, x):
        y_bar, x = jax.lax.optimization_barrier((y_bar.reshape(-1, y_bar.shape[-1]), x.reshape(-1, x.shape[-1])))
        return jax.lax.dot_general(y_bar, x, (((0,), (0,)), ((), ())))

    def elsewhere(y_bar, x):
        return jax.lax.dot_general(y_bar, x, ((rows, rows), ((), ())))

    return jax.lax.platform_dependent(y_bar, x, cpu=on_cpu, default=elsewhere)


_term_p = Primitive("linear_weight_term")
_term_p.def_impl(jax.jit(_product))
_term_p.def_abstract_eval(lambda x, weight: jax.make_jaxpr(_product)(x, weight).out_avals[0])
mlir.register_lowering(_term_p, mlir.lower_fun(_product, multiple_results=False))


def _term_jvp(primals, tangents):
    (x, weight), (dx, d_weight) = primals, tangents
    terms = [] if isinstance(dx, ad.Zero) else [_product(dx, weight)]
    terms += [] if isinstance(d_weight, ad.Zero) else [_term_p.bind(x, d_weight)]
    return _term_p.bind(x, weight), sum(terms[1:], terms[0])


def _term_transpose(y_bar, x, weight):
    if isinstance(y_bar, ad.Zero):
        return None, None
    if ad.is_undefined_primal(x):
        return jax.lax.dot_general(y_bar, weight, (((y_bar.ndim - 1,), (0,)), ((), ()))), None
    return None, _weight_gradient(y_bar, x)


def _term_batch(args, axes):
    x, weight = args
    if axes[1] is None:
        return _term_p.bind(jnp.moveaxis(x, axes[0], 0), weight), 0
    return jax.vmap(_product, axes)(x, weight), 0


ad.primitive_jvps[_term_p] = _term_jvp
ad.primitive_transposes[_term_p] = _term_transpose
batching.primitive_batchers[_term_p] = _term_batch
