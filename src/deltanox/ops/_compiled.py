"""Bodies of ops as compiled functions, for calls outside `jax.jit`."""

from collections.abc import Callable
from functools import wraps

import jax
from jax.extend.core import Primitive


def compiled(*static: str) -> Callable[[Callable], Callable]:
    """Decorate the body of an op, a function of arrays that is given its options by the names `static`.

    A call outside `jax.jit` compiles the body once for its shapes and options. Without this every such call would
    compile the op's loops again and keep them, since JAX finds a compiled loop by the identity of its body. In a
    program that is being traced the body is traced in place (`inline`), so that the program stays the same.

    With `implementation="reference"` the body runs as it is: it switches float64 on inside, of which a transform of a
    body traced with x64 off would know nothing.
    """

    def decorate(body: Callable) -> Callable:
        traced = jax.jit(body, static_argnames=static, inline=True)

        @wraps(body)
        def call(*args, **options):
            return (body if options.get("implementation") == "reference" else traced)(*args, **options)

        return call

    return decorate


def implement(primitive: Primitive, *static: str):
    """What `primitive` does outside `jax.jit`, with options by the names `static`: it is compiled, as it is inside,
    even while `jax_disable_jit` is on, since it has no other definition."""
    run = jax.jit(primitive.bind, static_argnames=static)

    @primitive.def_impl
    def _(*arrays, **options):
        with jax.disable_jit(False):
            return run(*arrays, **options)
