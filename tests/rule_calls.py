"""Calls of the gated delta rule with random arguments, their gradients, and their comparison."""

import jax
import jax.numpy as jnp
import numpy as np

from deltanox.ops import gated_delta_rule
from helpers import TOLERANCE, rel

NAMES = ("out", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")


def make(seed, lead, T, h, H, K, V, *, A=1.0, dtype=jnp.float32):
    """q, k, v, g, beta and the initial state, of mild size, with decays of rate A."""
    rng = np.random.default_rng(seed)  # NumPy's: JAX would compile a generator for every shape

    def normal(*shape):
        return rng.standard_normal((*lead, *shape), np.float32)

    q, k, v = (jnp.asarray(normal(*shape), dtype) for shape in ((T, h, K), (T, h, K), (T, H, V)))
    g, beta = -A * np.log1p(np.exp(normal(T, H))), 1 / (1 + np.exp(-normal(T, H)))
    return q, k, v, *(jnp.asarray(x, jnp.float32) for x in (g, beta, normal(H, K, V)))


def run(implementation, arrays, *, cotangents=("out", "state"), options=None, seed=7, **given):
    """Output, final state and all gradients, for random cotangents on what is named."""
    options = {"use_qk_l2norm": True, **(options or {})}

    def loss(*arrays):
        *rest, initial_state = arrays
        out, state = gated_delta_rule(
            *rest, initial_state=initial_state, implementation=implementation, **options, **given
        )
        rng = np.random.default_rng(seed)
        total = 0.0
        for name, x in (("out", out), ("state", state)):
            weight = rng.standard_normal(x.shape, np.float32)
            if name in cotangents:
                wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
                total += jnp.sum(x.astype(wide) * jnp.asarray(weight, wide))
        return total, (out, state)

    grad = jax.grad(loss, argnums=tuple(range(len(arrays))), has_aux=True)
    gradients, values = jax.jit(grad)(*arrays)
    return dict(zip(NAMES, (*values, *gradients)))


def compare(got, want, dtype="float32", *, factor=1.0):
    for name, x in got.items():
        bound = factor * TOLERANCE[dtype]["gradient" if name.startswith("d") else "value"]
        error = rel(x, want[name])
        assert error <= bound, f"{name}: relative error {error:.2e} above {bound:.0e}"
