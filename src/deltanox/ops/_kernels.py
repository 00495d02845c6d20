"""Launching a Pallas TPU kernel: by the platform that is compiled for, under JAX's settings, and under `jax.vmap`."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.experimental import pallas as pl
from jax.export import is_symbolic_dim
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import mlir

from ._compiled import implement
from ._manual import constants

# One launch --------------------
#
# A kernel is traced and lowered with settings of its own. The user's would reach into it: Mosaic knows no 64-bit types,
# which `jax_enable_x64` makes of Python's numbers, and few of the precisions that `jax_default_matmul_precision` gives
# to products which say none. And JAX lowers every branch of `platform_dependent` for every platform of a program for
# several of them (`jax.export`), the kernel's for a CPU too, where it can never run. So the call is a primitive of our
# own, which says what it is on each platform.


@contextlib.contextmanager
def _pinned():
    """JAX's settings as a kernel expects them."""
    with jax.enable_x64(False), jax.default_matmul_precision(None), jax.disable_jit(False), jax.debug_nans(False):
        yield


_launch_p = Primitive("tpu_kernel")
_launch_p.multiple_results = True
implement(_launch_p, "jaxpr", "interpret")


@_launch_p.def_effectful_abstract_eval
def _(*arrays, jaxpr, interpret):
    return jaxpr.out_avals, jaxpr.effects


def _lower(context, *arrays, jaxpr, interpret):
    platforms = context.platforms or context.module_context.platforms
    if interpret or tuple(platforms) == ("tpu",):
        with _pinned():
            return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(context, *arrays)
    if len(context.module_context.platforms) == 1:
        raise NotImplementedError(f"a TPU kernel cannot be compiled for {', '.join(platforms)}")

    def never_reached(*arrays):
        outputs = jaxpr.out_avals
        return [jnp.full(x.shape, jnp.nan if jnp.issubdtype(x.dtype, jnp.floating) else 0, x.dtype) for x in outputs]

    return mlir.lower_fun(never_reached, multiple_results=True)(context, *arrays)


# twice, so that a program for several platforms has a part for the TPU alone
mlir.register_lowering(_launch_p, _lower)
mlir.register_lowering(_launch_p, _lower, platform="tpu")


def launch(kernel: Callable, *, interpret: Any, **options) -> Callable:
    """`pl.pallas_call(kernel, interpret=…, **options)`, traced and compiled whatever JAX's settings are."""

    def call(*arrays):
        with _pinned():
            jaxpr = jax.make_jaxpr(pl.pallas_call(kernel, interpret=interpret, **options))(*arrays)
        out = _launch_p.bind(*arrays, jaxpr=jaxpr, interpret=bool(interpret))
        return out if isinstance(options["out_shape"], list | tuple) else out[0]

    return call


# By platform --------------------

_refused = Primitive("tpu_kernel_refused")
_refused.def_abstract_eval(lambda *, op: ShapedArray((), jnp.float32))


def _refuse(context, *, op):
    platforms = context.module_context.platforms
    others = [name for name in platforms if name not in ("cpu", "tpu")]
    if others or len(platforms) == 1:
        raise NotImplementedError(
            f"{op}: implementation='pallas' is a TPU kernel (on a CPU it is interpreted), but it is compiled for "
            f"{', '.join(others or platforms)}: use implementation='auto' or 'xla'"
        )
    return mlir.lower_fun(lambda: jnp.float32(0), multiple_results=False)(context)


mlir.register_lowering(_refused, _refuse)


def by_platform(kernel: Callable, op: str) -> Callable:
    """`kernel(*arrays, interpret=…)` on a TPU, the same interpreted on a CPU, an error at compile time elsewhere."""

    def launch(*arrays):
        outputs = jax.eval_shape(partial(kernel, interpret=False), *arrays)

        def refuse(*arrays):
            zero = _refused.bind(op=op)
            results = jax.tree.map(lambda x: jnp.broadcast_to(zero, x.shape).astype(x.dtype), outputs)
            return constants(results, jax.tree.leaves(arrays)[0])

        return jax.lax.platform_dependent(
            *arrays, cpu=partial(kernel, interpret=True), tpu=partial(kernel, interpret=False), default=refuse
        )

    return launch


def folded(launch: Callable) -> Callable:
    """`launch`, whose mapped axes under `jax.vmap` become part of the leading axis that all of its arrays have.

    Arrays and results may be trees. The kernel never sees another rank; what was not mapped is repeated.
    """
    mapped = custom_vmap(launch)

    @mapped.def_vmap
    def rule(size: int, batched: Any, *arrays):
        def merge(x, is_batched):
            x = x if is_batched else jnp.broadcast_to(x[None], (size, *x.shape))
            return x.reshape(size * x.shape[1], *x.shape[2:])

        out = folded(launch)(*jax.tree.map(merge, arrays, tuple(batched)))
        split = jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), out)
        return split, jax.tree.map(lambda _: True, out)

    return mapped


def kernel_or(xla: Callable, kernel: Callable) -> Callable:
    """`kernel`, but `xla` where a size is a symbol of `jax.export`, which kernels cannot be compiled with: a size of
    the arrays, or of an axis that `jax.vmap` maps over."""

    @custom_vmap
    def either(*arrays):
        symbolic = any(is_symbolic_dim(size) for x in jax.tree.leaves(arrays) for size in x.shape)
        return (xla if symbolic else kernel)(*arrays)

    @either.def_vmap
    def rule(size: Any, batched: Any, *arrays):
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, tuple(batched))
        maps = (jax.vmap(f, axes) for f in (xla, kernel))
        out = jax.vmap(xla, axes)(*arrays) if is_symbolic_dim(size) else kernel_or(*maps)(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return either


def on_engine(engine: str, op: str, xla: Callable, kernel: Callable, *arrays):
    """One pass on the engine that was asked for; of "auto", the kernel where a TPU is compiled for."""
    if engine == "xla":
        return xla(*arrays)
    if engine == "pallas":
        return folded(by_platform(kernel, op))(*arrays)
    compiled = kernel_or(xla, folded(partial(kernel, interpret=False)))
    return jax.lax.platform_dependent(*arrays, tpu=compiled, default=xla)
