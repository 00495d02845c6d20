"""Hand-derived backward passes are not differentiated again: a second derivative must end in a sentence, not in a
wrong value."""

from collections.abc import Callable

import jax

from ._manual import alike


def no_second_derivative(implementation: str, remedy: str) -> NotImplementedError:
    return NotImplementedError(
        f"implementation='{implementation}' has a hand-derived backward pass, which has no derivative of its own: for "
        f"a second derivative, {remedy}"
    )


def once_differentiable(implementation: str, remedy: str, *, inline: bool = True) -> Callable:
    """Decorate the backward pass of a `custom_vjp`: differentiating it raises NotImplementedError with the remedy.
    `inline=False` is for one that switches float64 on inside, which `jax.jit` around it would not see."""

    def decorate(backward: Callable) -> Callable:
        guarded = jax.custom_jvp(backward)

        @guarded.defjvp
        def second(primals, tangents):
            raise no_second_derivative(implementation, remedy)

        # traced once: with jax_remat3 a forward pass is looked at twice, which JAX's custom_jvp alone doesn't stand
        return jax.jit(guarded, inline=True) if inline else guarded

    return decorate


def together(*arrays):
    """The same arrays. In the backward pass each of their cotangents waits for all of them, so that what they were
    made of can be freed before any is made use of."""
    return _together(*alike(arrays))


@jax.custom_vjp
def _together(*arrays):
    return arrays


_together.defvjp(lambda *arrays: (arrays, None), lambda _, bars: jax.lax.optimization_barrier(bars))
