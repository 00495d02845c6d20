"""The chunked cross entropy against logits in full and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.ops.cross_entropy import cross_entropy
from helpers import TOLERANCE, rel


def full(hidden, head, labels, weights):
    """Σ weights · loss in NumPy float64, and its gradients, by the formulas."""
    x, w = np.asarray(hidden, np.float64), np.asarray(head, np.float64)
    logits = x @ w.T
    top = logits.max(-1, keepdims=True)
    normaliser = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
    losses = normaliser - np.take_along_axis(logits, labels[..., None], -1)[..., 0]
    dlogits = (np.exp(logits - normaliser[..., None]) - np.eye(w.shape[0])[labels]) * weights[..., None]
    return losses, dlogits @ w, dlogits.reshape(-1, w.shape[0]).T @ x.reshape(-1, w.shape[1])


def case(key, N, dtype=jnp.float32, shape=(2, 13), D=7, scale=1.0):
    keys = jax.random.split(key, 4)
    hidden = (scale * jax.random.normal(keys[0], (*shape, D))).astype(dtype)
    head = jax.random.normal(keys[1], (N, D)).astype(dtype)
    labels = jax.random.randint(keys[2], shape, 0, N)
    weights = jax.random.normal(keys[3], shape)
    return hidden, head, labels, weights


# One block; blocks that divide the vocabulary; a rest of one entry; blocks of one; a block one short of the vocabulary.
@pytest.mark.parametrize("N, block_size", [(29, 8192), (29, 29), (32, 8), (29, 7), (5, 1), (29, 28)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_values_and_gradients(N, block_size, dtype, getkey):
    hidden, head, labels, weights = case(getkey(), N, jnp.dtype(dtype))

    def loss(hidden, head):
        losses = cross_entropy(hidden, head, labels, block_size=block_size)
        assert losses.dtype == jnp.float32
        return (losses * weights).sum(), losses

    (dx, dw), losses = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
    want, want_dx, want_dw = full(hidden, head, np.asarray(labels), np.asarray(weights))
    assert dx.dtype == hidden.dtype and dw.dtype == head.dtype
    assert rel(losses, want) < TOLERANCE["float32"]["value"]
    assert rel(dx, want_dx) < TOLERANCE[dtype]["gradient"]
    assert rel(dw, want_dw) < TOLERANCE[dtype]["gradient"]


@pytest.mark.parametrize("block_size", [64, 5])
def test_masked_places_stay_out(block_size, getkey):
    hidden, head, labels, weights = case(getkey(), 17, shape=(11,))
    mask = jnp.arange(11) % 3 != 0
    dirty_hidden = jnp.where(mask[:, None], hidden, jnp.nan)
    dirty_labels = jnp.where(mask, labels, -100)

    def loss(hidden, head):
        losses = cross_entropy(hidden, head, dirty_labels, mask=mask, block_size=block_size)
        return (losses * weights).sum(), losses

    (dx, dw), losses = jax.grad(loss, argnums=(0, 1), has_aux=True)(dirty_hidden, head)
    want, want_dx, want_dw = full(hidden, head, np.asarray(labels), np.asarray(weights) * np.asarray(mask))
    assert np.all(np.asarray(losses)[~np.asarray(mask)] == 0)
    assert rel(np.asarray(losses)[np.asarray(mask)], want[np.asarray(mask)]) < 1e-5
    assert np.all(np.asarray(dx)[~np.asarray(mask)] == 0)
    assert rel(dx, want_dx) < 1e-5 and rel(dw, want_dw) < 1e-5


@pytest.mark.parametrize("block_size", [64, 5])
def test_large_logits_do_not_overflow(block_size, getkey):
    hidden, head, labels, weights = case(getkey(), 17, scale=1000.0)
    losses = cross_entropy(hidden, head, labels, block_size=block_size)
    assert rel(losses, full(hidden, head, np.asarray(labels), np.asarray(weights))[0]) < 1e-5


@pytest.mark.parametrize("block_size", [64, 5])
@pytest.mark.parametrize("label", [-1, 17, 1000])
def test_a_label_outside_the_vocabulary_is_not_a_loss(block_size, label, getkey):
    hidden, head, labels, _ = case(getkey(), 17, shape=(4,))
    losses = np.asarray(cross_entropy(hidden, head, labels.at[2].set(label), block_size=block_size))
    assert np.isnan(losses[2]) and np.isfinite(np.delete(losses, 2)).all()


def test_logits_of_the_whole_vocabulary_are_never_in_memory():
    """The largest temporary of value and gradient is far below [T N] in float32."""
    T, D, N, block = 64, 8, 65536 + 17, 1024
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((T, D), jnp.float32), ((N, D), jnp.float32), ((T,), jnp.int32))]

    def loss(hidden, head, labels, block_size):
        return cross_entropy(hidden, head, labels, block_size=block_size).sum()

    def temporaries(block_size):
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=3).lower(*shapes, block_size).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporaries(2 * N) > T * N * 4
    # The blocks' own gradient of the head [N D] and two blocks of logits.
    assert temporaries(block) < 2 * N * D * 4 + 3 * T * block * 4 < T * N * 4


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(head=jnp.zeros((7, 17))), r"head \(7, 17\).*transpose"),
        (dict(head=jnp.zeros((17, 7), jnp.bfloat16)), "one dtype.*bfloat16.*cast"),
        (dict(labels=jnp.zeros((3, 14), jnp.int32)), r"\(3, 13\).*labels \(3, 14\)"),
        (dict(block_size=0), "`block_size` must be at least 1"),
    ],
)
def test_wrong_arguments(change, words):
    arguments = (
        dict(hidden=jnp.zeros((3, 13, 7)), head=jnp.zeros((17, 7)), labels=jnp.zeros((3, 13), jnp.int32)) | change
    )
    with pytest.raises(ValueError, match=words):
        # Without the checker: our own sentence.
        cross_entropy.__wrapped__(**arguments) if hasattr(cross_entropy, "__wrapped__") else cross_entropy(**arguments)
