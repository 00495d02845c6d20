"""Every op, layer and a model under every order of `jax.vmap` and `jax.grad`: the values of separate calls.

A gradient of something that is not mapped is summed over the mapped axis in grad of vmap and is one of each example in
vmap of grad. A rule that cannot tell the two apart gives one of them wrongly, and finite.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from helpers import rel
from transformed import CASES, M, N, gradients, mapped, normal

SLOW = {
    "rule, chunked",
    "rule, reference",
    "rule, pallas",
    "net, auto",
    "net, pallas",
    "convolution, reference",
    "convolution, pallas",
    "GatedDeltaNet, auto",
    "GatedDeltaNet, pallas",
    "GatedDeltaNet, recompute",
    "model",
}


def stack(trees):
    return jax.tree.map(lambda *x: np.stack(x), *trees)


def total(trees):
    return jax.tree.map(lambda *x: np.sum(np.asarray(x, np.float64), axis=0), *trees)


def close(what, got, want):
    for (path, x), y in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True):
        error = rel(x, y)
        assert error <= 2e-5, f"{what}, gradient of {jax.tree_util.keystr(path)}: relative error {error:.1e}"


def summed(alone):
    """Gradients of each example as those of the sum over the examples: one sum of the parameters'."""
    return (total([g[0] for g in alone]), *stack([g[1:] for g in alone]))


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow if n in SLOW else ()) for n in CASES])
def test_vmap_of_grad_and_grad_of_vmap(name):
    f, params, xs = CASES[name]()
    loss, argnums = gradients(f, xs)
    one = jax.jit(jax.grad(loss, argnums))
    alone = [one(params, jax.tree.map(lambda x, i=i: x[i], xs)) for i in range(N)]

    @jax.jit
    def transforms(params, xs):
        return (
            mapped(jax.grad(loss, argnums))(params, xs),
            jax.grad(lambda p, xs: jnp.sum(mapped(loss)(p, xs)), argnums)(params, xs),
        )

    each, summed_up = transforms(params, xs)
    close("vmap of grad", each, stack(alone))
    close("grad of vmap", summed_up, summed(alone))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name not in SLOW and name != "rule, xla"])
def test_every_order_of_vmap_and_grad(name):
    """Two maps with other arguments mapped in each, Jacobians, and maps over cotangents."""
    f, params, xs = CASES[name]()
    many = jax.tree.map(lambda p: jnp.stack([p, 0.5 * p]), params)
    example = [jax.tree.map(lambda x, i=i: x[i], xs) for i in range(N)]
    parameters = [jax.tree.map(lambda p, m=m: p[m], many) for m in range(M)]
    loss, argnums = gradients(f, xs)
    cotangents = normal(N, *jax.eval_shape(f, params, example[0]).shape)
    grad = jax.grad(loss, argnums)
    one = jax.jit(grad)
    alone = [[one(p, x) for x in example] for p in parameters]
    pull = jax.jit(lambda p, x, bar: jax.vjp(f, p, x)[1](bar)[: len(argnums)])
    pulled = stack([pull(params, example[0], bar) for bar in cotangents])

    @jax.jit
    def transforms(params, many, xs, cotangents):
        grad_of_vmap = jax.grad(lambda p, xs: jnp.sum(mapped(loss)(p, xs)), argnums)
        return {
            "vmap of vjp": jax.vmap(jax.vjp(f, params, example[0])[1])(cotangents)[: len(argnums)],
            "vmap of grad of vmap": jax.vmap(grad_of_vmap, (0, None))(many, xs),
            "vmap of vmap of grad": jax.vmap(mapped(grad), (0, None))(many, xs),
            "vmap of vmap of grad, examples outside": jax.vmap(jax.vmap(grad, (0, None)), (None, 0))(many, xs),
            "grad of vmap of vmap": jax.grad(lambda p: jnp.sum(jax.vmap(mapped(loss), (0, None))(p, xs)))(many),
            "jacrev of vmap": jax.jacrev(lambda p: mapped(loss)(p, xs))(params),
        }

    each = stack([stack(row) for row in alone])
    want = {
        "vmap of vjp": pulled,
        "vmap of grad of vmap": stack([summed(row) for row in alone]),
        "vmap of vmap of grad": each,
        "vmap of vmap of grad, examples outside": jax.tree.map(lambda x: np.swapaxes(x, 0, 1), each),
        "grad of vmap of vmap": stack([summed(row)[0] for row in alone]),
        "jacrev of vmap": stack([g[0] for g in alone[0]]),
    }
    for what, got in transforms(params, many, xs, cotangents).items():
        close(what, got, want[what])
