"""The experts' layer compiled for TPUs that are not here, from one token to many, tiny and as released."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from deltanox.nn import SparseMoE
from deltanox.tools import aot
from helpers import needs_libtpu
from releases import RELEASES

pytestmark = needs_libtpu
# D, experts, top k, width of an expert and of the shared one
SIZES = {"tiny": (256, 8, 2, 128, 128), "many": (256, 64, 8, 128, 128)} | {
    name: (c.embed_size, c.num_experts, c.top_k, c.expert_size, c.shared_size)
    for name, c in RELEASES.items()
    if c.num_experts
}


def gradient(size, T, topology, batch=None):
    """The report of the gradients of weights and tokens, bfloat16."""
    D, E, k, inner, shared = SIZES[size]

    def make(key):
        return SparseMoE(
            D, num_experts=E, top_k=k, expert_size=inner, shared_size=shared, dtype=jnp.bfloat16, key=key
        )  # fmt: skip

    def loss(layer, x):
        run = layer if batch is None else jax.vmap(layer)
        return jnp.sum(jnp.square(run(x)[0].astype(jnp.float32)))

    def gradients(layer, x):
        return eqx.filter_grad(lambda both: loss(*both))((layer, x))

    x = jax.ShapeDtypeStruct((T, D) if batch is None else (batch, T, D), jnp.bfloat16)
    return aot.compile(gradients, eqx.filter_eval_shape(make, jax.random.key(0)), x, topology=topology)


def check(report, size, tokens):
    """No more memory than a few copies of the rows that go to experts, and not one row an expert and token."""
    D, E, k, inner, _ = SIZES[size]
    rows = tokens * k + min(E, tokens * k) * 256  # the last block of an expert may be filled in part
    assert report.temporary_bytes < 2 * rows * (4 * D + 6 * inner) + 2**20
    assert report.flops < 3 * (6 * rows * D * inner + 2 * tokens * D * (E + 1) + 6 * tokens * D * SIZES[size][4])
    return report


@pytest.mark.parametrize("size, T, topology", [("tiny", 1, "v6e"), ("tiny", 7, "v5e"), ("many", 64, "tpu7x")])
def test_small(size, T, topology):
    """One token is a case of its own: libtpu aborts on the scatter that a gather's usual gradient is."""
    check(gradient(size, T, topology), size, T)


def test_a_batch_shares_the_blocks():
    check(gradient("tiny", 64, "v5e", batch=2), "tiny", 128)


EXHAUSTIVE = pytest.mark.exhaustive


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["v5e", "v6e", "tpu7x"])
@pytest.mark.parametrize("T", [1, 2, 8, 17, pytest.param(8192, marks=EXHAUSTIVE)])
def test_tiny(T, topology):
    check(gradient("tiny", T, topology), "tiny", T)


@pytest.mark.slow
@pytest.mark.parametrize(
    "size, T, topology",
    [
        ("80B-A3B", 1, "v5e"), ("35B-A3B", 512, "v6e"), ("397B-A17B", 8, "tpu7x"),
        *(
            pytest.param(*row, marks=EXHAUSTIVE)
            for row in (("80B-A3B", 8, "v6e"), ("35B-A3B", 1, "tpu7x"), ("122B-A10B", 8, "v6e"))
        ),
    ],
)  # fmt: skip
def test_released_sizes(size, T, topology):
    check(gradient(size, T, topology), size, T)
