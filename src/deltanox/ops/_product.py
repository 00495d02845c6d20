"""The product of a linear layer, y = x Wᵀ, whose weight's gradient is one product for all rows of all sequences."""

import functools

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from ._compiled import implement


def _product(x, weight):
    return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))


@jax.custom_jvp
def dot(x: Float[Array, "*B I"], weight: Float[Array, "O I"]) -> Float[Array, "*B O"]:
    """x Wᵀ over the last axis; all derivatives exist."""
    return _product(x, weight)


@functools.partial(dot.defjvp, symbolic_zeros=True)
def _dot_jvp(primals, tangents):
    (x, weight), (dx, d_weight) = primals, tangents
    y = dot(x, weight)
    # a factor that isn't differentiated (a frozen weight) has no term
    terms = [] if isinstance(dx, SymbolicZero) else [dot(dx, weight)]
    terms += [] if isinstance(d_weight, SymbolicZero) else [_term_p.bind(x, d_weight)]
    return y, sum(terms[1:], terms[0]) if terms else jnp.zeros_like(y)


# The weight's term of the product rule is a primitive of its own for the sake of its transpose: the weight's gradient
# is ȳᵀ x over all rows of all sequences. On a CPU that has to be one product of two matrices that lie in memory: with
# the batch as an axis of its own, or ȳ not yet written, XLA gathers ȳᵀ column by column, fused with whatever made ȳ.


def weight_gradient(y_bar: Float[Array, "*B O"], x: Float[Array, "*B I"]) -> Float[Array, "O I"]:
    """ȳᵀ x, summed over all rows."""
    rows = tuple(range(x.ndim - 1))

    def on_cpu(y_bar, x):
        y_bar, x = jax.lax.optimization_barrier((y_bar.reshape(-1, y_bar.shape[-1]), x.reshape(-1, x.shape[-1])))
        return jax.lax.dot_general(y_bar, x, (((0,), (0,)), ((), ())))

    def elsewhere(y_bar, x):
        return jax.lax.dot_general(y_bar, x, ((rows, rows), ((), ())))

    return jax.lax.platform_dependent(y_bar, x, cpu=on_cpu, default=elsewhere)


_term_p = Primitive("linear_weight_term")
implement(_term_p)
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
    return None, weight_gradient(y_bar, x)


def _term_batch(args, axes):
    x, weight = args
    if axes[1] is None:
        return _term_p.bind(jnp.moveaxis(x, axes[0], 0), weight), 0
    return jax.vmap(_product, axes)(x, weight), 0


ad.primitive_jvps[_term_p] = _term_jvp
ad.primitive_transposes[_term_p] = _term_transpose
batching.primitive_batchers[_term_p] = _term_batch
