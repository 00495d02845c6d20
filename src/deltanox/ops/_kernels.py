"""Launching a Pallas TPU kernel: by the platform that is compiled for, and under `jax.vmap`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap
from jax.extend.core import Primitive
from jax.interpreters import mlir

from ._manual import constants

_refused = Primitive("tpu_kernel_refused")
_refused.def_abstract_eval(lambda *, op: ShapedArray((), jnp.float32))


def _refuse(context, *, op):
    platforms = context.platforms or context.module_context.platforms
    raise NotImplementedError(
        f"{op}: implementation='pallas' is a TPU kernel (on a CPU it is interpreted), but it is compiled for "
        f"{', '.join(platforms)}: use implementation='auto' or 'xla'"
    )


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


def on_engine(engine: str, op: str, xla: Callable, kernel: Callable, *arrays):
    """One pass on the engine that was asked for; of "auto", the kernel where a TPU is compiled for."""
    if engine == "xla":
        return xla(*arrays)
    if engine == "pallas":
        return folded(by_platform(kernel, op))(*arrays)
    return jax.lax.platform_dependent(*arrays, tpu=folded(partial(kernel, interpret=False)), default=xla)
