"""The loss of the head for one token further."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deltanox.models import Qwen3_5Config, qwen3_5
from deltanox.precision import Precision
from deltanox.train import Batch, config_from_dict, init_state, make_step, next_token_loss
from deltanox.train._loss import further_labels
from helpers import rel

CONFIG = Qwen3_5Config(
    vocab_size=257, embed_size=16, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
    key_head_size=8, value_head_size=4, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=16, tied_head=True,
    mtp_head=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return jax.tree.map(lambda x: 10 * x, eqx.filter_jit(qwen3_5)(CONFIG, key=jax.random.key(0)))


def documents(*lengths):
    """Pairs of input and label of documents of so many tokens, packed in a row, and padding."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 256, n) for n in lengths]
    rows = [np.concatenate([text[:-1] for text in texts]), np.concatenate([text[1:] for text in texts])]
    rows += [np.repeat(np.arange(len(lengths)), [n - 1 for n in lengths]), np.ones(sum(lengths) - len(lengths), bool)]
    rows = [jnp.asarray(np.concatenate([x, np.zeros(2, x.dtype)])[None]) for x in rows]
    return Batch(*(x.astype(jnp.int32) for x in rows[:3]), rows[3]), [jnp.asarray(t, jnp.int32) for t in texts]


def test_labels():
    """Row 68: of documents of 4 and 3 tokens there are 2 and 1, and each is the token two further."""
    batch, texts = documents(4, 3)
    targets, there = further_labels(batch.labels, batch.segment_ids, batch.mask)
    np.testing.assert_array_equal(there[0], [True, True, False, True, False, False, False])
    np.testing.assert_array_equal(targets[there], np.concatenate([text[2:] for text in texts]))
    _, unmasked = further_labels(batch.labels, batch.segment_ids, None)
    assert not unmasked[0, -1]


def test_loss_is_that_of_the_documents_alone(model):
    batch, texts = documents(9, 6)
    sums = eqx.filter_jit(next_token_loss)(model, batch, further=True)

    @eqx.filter_jit
    def alone(model, tokens):
        hidden, _, _ = model.hidden(tokens)
        logits, _ = model.mtp_logits(hidden[:-2], tokens[1:-1])
        return -jnp.sum(jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[2:, None], axis=-1))

    assert rel(sums.further, sum(alone(model, text) for text in texts)) < 1e-5
    plain = eqx.filter_jit(next_token_loss)(model, batch)
    assert plain.further is None and rel(plain.nats, sums.nats) < 1e-6


@pytest.mark.parametrize("weight", [0.0, 0.1])
def test_step(model, weight):
    """The head is trained if its loss has a weight, and then its loss is the mean over labels that there are."""
    state, static, optimiser = init_state(model, lambda _: optax.sgd(0.1), key=jax.random.key(1))
    batch = jax.tree.map(lambda x: x[None], documents(9, 6)[0])
    step = make_step(static, optimiser, lambda step: jnp.float32(0.1), Precision(), further_weight=weight)
    after, metrics = jax.jit(step)(state, batch)
    moved = [
        not np.array_equal(a, b) for a, b in zip(*map(jax.tree.leaves, (state.parameters.mtp, after.parameters.mtp)))
    ]
    assert all(moved) if weight else not any(moved)
    sums = eqx.filter_jit(next_token_loss)(model, documents(9, 6)[0], further=True)
    assert rel(metrics.further_loss, sums.further / 11 if weight else 0) < 1e-6
    assert rel(metrics.loss, sums.nats / 13) < 1e-6


def test_config():
    model = {name: x for name, x in CONFIG.__dict__.items() if name != "mtp_head" and x is not None}
    table = {"model": model, "train": {"further_weight": 0.1}}
    with pytest.raises(
        ValueError, match=r"train.further_weight must be 0 for a model without .*: set model.mtp_head = true"
    ):
        config_from_dict(table)
    assert config_from_dict({**table, "model": model | {"mtp_head": True}}).train.further_weight == 0.1
