"""States are values: a rejected draft is undone by going on from the state before it, in every row from its own."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.generate import decode, prefill
from deltanox.models import Qwen3_5Config, qwen3_5
from helpers import rel

# row 51: dk ≠ dv
CONFIG = Qwen3_5Config(
    vocab_size=50, embed_size=16, num_layers=4, full_attention_interval=2, num_key_heads=2, num_value_heads=4,
    key_head_size=16, value_head_size=24, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=20,
)  # fmt: skip
CAPACITY = 128


@pytest.fixture(scope="module")
def model():
    small = eqx.filter_jit(qwen3_5)(CONFIG, key=jax.random.key(0))
    return jax.tree.map(lambda x: 5 * x if x.ndim > 2 else x, small)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 50, shape), jnp.int32)


def walk(model, state, tokens):
    """Decode tokens [B T]: logits and states after each."""
    found = []
    for token in tokens.T:
        logits, state = decode(model, token, state)
        found.append((logits, state))
    return found


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)))


def test_drafts_that_are_rejected(model):
    """Row 48: eight tokens, three of them taken back, three others: the same as the eight that remain in one go."""
    start = prefill(model, draw(0, 1, 5), capacity=CAPACITY)[1]
    first, others = draw(1, 1, 8), draw(2, 1, 3)
    went = walk(model, start, first)
    again = walk(model, went[4][1], others)
    straight = walk(model, start, jnp.concatenate([first[:, :5], others], axis=1))
    assert equal(again[-1], straight[-1]) and not equal(again[-1][1], went[-1][1])


def test_each_row_takes_its_own_state(model):
    """Row 49: of the states after each of five tokens, rows take the first, third and fifth."""
    start = prefill(model, draw(3, 3, 5), capacity=CAPACITY)[1]
    tokens, accepted, after = draw(4, 3, 5), jnp.asarray([0, 2, 4]), draw(5, 3, 1)
    states = jax.tree.map(lambda *x: jnp.stack(x), *[state for _, state in walk(model, start, tokens)])
    chosen = jax.vmap(lambda state, i: jax.tree.map(lambda x: x[i], state), in_axes=(1, 0))(states, accepted)
    got = walk(model, chosen, after)[0][0]
    for row, count in enumerate(accepted + 1):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], start)
        alone = walk(model, one, jnp.concatenate([tokens[row : row + 1, :count], after[row : row + 1]], axis=1))
        assert rel(got[row], alone[-1][0][0]) < 1e-5


@pytest.mark.parametrize("at", [64, 70])
def test_a_prefix_is_read_once(model, at):
    """Row 50: going on from a state that was kept at the end of a chunk, and beside one."""
    tokens = draw(6, 1, 100)
    whole, state = prefill(model, tokens, capacity=CAPACITY)
    _, kept = prefill(model, tokens[:, :at], capacity=CAPACITY)

    @eqx.filter_jit
    def go_on(model, tokens, state):
        return jax.vmap(model)(tokens, state)

    for _ in range(2):  # the kept state is as good the second time
        logits, end = go_on(model, tokens[:, at:], kept)
        assert rel(logits[:, -1], whole) < 1e-5
        for a, b in zip(jax.tree.leaves(end.blocks[0]), jax.tree.leaves(state.blocks[0])):
            assert rel(a, b) < 1e-5
