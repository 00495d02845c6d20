"""Kernels that are chosen by the platform compiled for, never by the one that happens to be at hand."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


def on_tpu(kernel: Callable, *args: Any, elsewhere: Callable | None = None) -> Any:
    """`kernel(*args, interpret=False)` where a TPU is compiled for.

    Other platforms get `elsewhere(*args)`, of the same result; without it a CPU interprets the kernel, and compiling
    for anything else raises NotImplementedError.
    """

    def compiled(*args):
        return kernel(*args, interpret=False)

    if elsewhere is not None:
        return jax.lax.platform_dependent(*args, tpu=compiled, default=elsewhere)

    def interpreted(*args):
        return kernel(*args, interpret=True)

    def refused(*args):
        shapes = jax.eval_shape(interpreted, *args)
        return jax.tree.map(lambda x: _no_kernel_p.bind(shape=x.shape, dtype=x.dtype), shapes)

    return jax.lax.platform_dependent(*args, tpu=compiled, cpu=interpreted, default=refused)


_no_kernel_p = Primitive("no_kernel_for_this_platform")


@_no_kernel_p.def_abstract_eval
def _(*, shape, dtype):
    return ShapedArray(shape, dtype)


def _refuse(context, *, shape, dtype):
    raise NotImplementedError(
        f"implementation='pallas' is made of TPU kernels and cannot be compiled for "
        f"{', '.join(context.module_context.platforms)}: use 'auto' or 'xla'"
    )


mlir.register_lowering(_no_kernel_p, _refuse)
batching.primitive_batchers[_no_kernel_p] = lambda args, axes, **shape: (_no_kernel_p.bind(**shape), None)


def fold_batch(launch: Callable) -> Callable:
    """`launch`, whose arguments and results all have a batch axis in front, under `jax.vmap`: a mapped axis becomes
    part of the batch. What isn't mapped is repeated."""
    mapped = custom_vmap(launch)

    @mapped.def_vmap
    def _(axis_size, in_batched, *args):
        def fold(batched, x):
            x = x if batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
            return x.reshape(-1, *x.shape[2:])

        out = mapped(*jax.tree.map(fold, tuple(in_batched), args))
        out = jax.tree.map(lambda x: x.reshape(axis_size, -1, *x.shape[1:]), out)
        return out, jax.tree.map(lambda _: True, out)

    return mapped
