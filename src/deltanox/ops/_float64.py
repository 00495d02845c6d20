"""A function evaluated in float64, whatever JAX's x64 switch says."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

from ._derivatives import once_differentiable


def in_float64(f: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate `f(floats, rest, options)`, which casts the tuple `floats` to float64 and its results back.

    With x64 off, JAX cannot differentiate through float64 by itself, so the derivative is taken here, in float64 too:
    reverse mode, once. With x64 on, every derivative exists. `rest` is a tuple of arrays without derivative, or None;
    `options` is hashable.
    """

    run = jax.jit(f, static_argnums=2)

    def wide(floats, rest, options):
        with jax.enable_x64(True):
            return run(floats, rest, options)

    op = jax.custom_vjp(wide, nondiff_argnums=(2,))

    def forward(floats, rest, options):
        # not `op` itself: forward mode over this pass must reach the sentence in `gradients`
        return wide(floats, rest, options), (floats, rest)

    @partial(jax.jit, static_argnums=3)
    def pull(floats, rest, cotangents, options):
        return jax.vjp(lambda floats: f(floats, rest, options), floats)[1](cotangents)[0]

    def backward(options, saved, cotangents):
        # no jit around the guard: it would be traced with x64 off
        @once_differentiable("reference", "switch on jax_enable_x64", inline=False)
        def gradients(saved, cotangents):
            with jax.enable_x64(True):
                return pull(*saved, cotangents, options)

        return gradients(saved, cotangents), None

    op.defvjp(forward, backward)

    def call(floats, rest, options):
        return (run if jax.config.read("jax_enable_x64") else op)(floats, rest, options)

    return call
