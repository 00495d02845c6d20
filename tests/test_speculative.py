"""Decoding with drafts of the multi-token prediction head gives the text of decoding without."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from deltanox.generate import Sampler, generate, pad_prompts, prefill, stream
from deltanox.generate._request import check_request
from deltanox.generate._sampling import GREEDY
from deltanox.generate._speculative import Speculative
from deltanox.models import Qwen3_5Config, qwen3_5

# so few tokens that a head that learnt nothing is right now and then
CONFIG = Qwen3_5Config(
    vocab_size=5, embed_size=16, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
    key_head_size=8, value_head_size=12, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=24, mtp_head=True,
)  # fmt: skip
PROMPTS = [[1, 4, 2, 0, 3], [2], [3, 3, 1]]


def make(config, seed=0):
    model = eqx.filter_jit(qwen3_5)(config, key=jax.random.key(seed))
    return jax.tree.map(lambda x: 8 * x if x.ndim > 1 else x, model)


@pytest.fixture(scope="module")
def model():
    return make(CONFIG)


@pytest.fixture(scope="module", params=["left", "right"])
def batch(request):
    return pad_prompts(PROMPTS, side=request.param)


@pytest.mark.parametrize("drafts", [1, 2])
def test_greedy_text(model, batch, drafts):
    """Of ragged rows that accept different numbers of drafts in a step."""
    tokens, mask = batch
    want = generate(model, tokens, mask=mask, max_new_tokens=40)
    assert all(len(set(row.tolist())) > 2 for row in want)
    drawn = stream(model, tokens, mask=mask, max_new_tokens=40, drafts=drafts)
    np.testing.assert_array_equal(np.stack(list(drawn), -1), want)
    counts = drawn.statistics
    assert 0 < counts.accepted < counts.drafted == drafts * counts.steps
    # each row: the first token from the prompt, then one a step and the accepted drafts, of which the last may end it
    assert 3 * 39 <= counts.steps + counts.accepted <= 3 * 39 + 3
    assert counts.accepted_per_step == counts.accepted / counts.steps


def test_rows_accept_different_numbers(model):
    tokens, mask = pad_prompts(PROMPTS)
    engine = Speculative(model, check_request(model, tokens, mask, 40, None, GREEDY, (), None, 2, None))
    engine.first()
    counts = np.stack([np.asarray(engine.step(np.zeros(3, bool))[1]) for _ in range(12)])
    assert any(len(set(row)) > 1 for row in counts.tolist()) and set(counts.ravel()) == {1, 2, 3}


def test_the_end_in_the_middle_of_drafts(model):
    want = generate(model, PROMPTS[0], max_new_tokens=12)
    for new in range(1, 12):
        np.testing.assert_array_equal(generate(model, PROMPTS[0], max_new_tokens=new, drafts=2), want[:new])
    # caches of not a slot too many
    np.testing.assert_array_equal(generate(model, PROMPTS[0], max_new_tokens=12, drafts=2, capacity=5 + 11 + 2), want)


def test_drafts_that_are_all_right(model):
    """With zeros before both heads every token is the lowest, and the steps can be counted: 1 token from the prompt,
    then 3 a step."""
    zeros = eqx.tree_at(lambda m: (m.norm.weight, m.mtp.norm.weight), model, (-jnp.ones(16), -jnp.ones(16)))
    drawn = stream(zeros, [2, 3], max_new_tokens=9, drafts=2)
    np.testing.assert_array_equal(list(drawn), [0] * 9)
    # of the last step's three tokens two are text, both of them drafts
    assert dataclasses.astuple(drawn.statistics) == (3, 6, 6)


def test_stop_tokens(model, batch):
    tokens, mask = batch
    for stop in range(5):
        options = dict(mask=mask, max_new_tokens=20, stop_tokens=[stop])
        np.testing.assert_array_equal(generate(model, tokens, drafts=2, **options), generate(model, tokens, **options))


def test_sampling(getkey, model):
    """A draft that isn't the token drawn is dropped, so that the text is a function of the key alone."""
    tokens, mask = pad_prompts(PROMPTS)
    options = dict(mask=mask, max_new_tokens=20, sampler=Sampler(temperature=2.0, top_k=4), key=getkey())
    drawn = stream(model, tokens, drafts=2, **options)
    np.testing.assert_array_equal(np.stack(list(drawn), -1), generate(model, tokens, **options))
    assert 0 < drawn.statistics.accepted < drawn.statistics.drafted


@pytest.mark.slow
def test_unstacked_and_after_a_state(model):
    flat = model.unstack()
    prompt = PROMPTS[0] + PROMPTS[2]
    want = generate(model, prompt, max_new_tokens=20)
    np.testing.assert_array_equal(generate(flat, prompt, max_new_tokens=20, drafts=2), want)
    _, state = prefill(model, jnp.asarray([PROMPTS[0]]), capacity=8)
    for drafts in (0, 2, 2):  # the state stays good
        got = generate(model, PROMPTS[2], max_new_tokens=20, state=state, drafts=drafts)
        np.testing.assert_array_equal(got, want)


def test_nan(model):
    broken = eqx.tree_at(lambda m: m.norm.weight, model, model.norm.weight.at[0].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="logits of row 0 are NaN at new token 0"):
        generate(broken, [1, 2], max_new_tokens=3, drafts=2)


def test_a_head_that_is_nan_drafts_and_is_wrong(model):
    broken = eqx.tree_at(lambda m: m.mtp.norm.weight, model, model.mtp.norm.weight.at[0].set(jnp.nan))
    np.testing.assert_array_equal(
        generate(broken, [1, 2], max_new_tokens=9, drafts=2), generate(model, [1, 2], max_new_tokens=9)
    )


@pytest.mark.parametrize(
    "kwargs, sentence",
    [
        ({"drafts": -1}, "`drafts` must be an integer of at least 0, but it is -1"),
        ({"drafts": 1, "model": None}, "`drafts` = 1 needs a model with a multi-token prediction head.* `mtp.\\*`"),
        ({"drafts": 2, "capacity": 8}, r"length \+ max_new_tokens - 1 \+ drafts = 9, but it is 8: raise it"),
        ({"state": "of two rows"}, "`state` must be one of this model, with the batch of 1 rows in front"),
        ({"state": "unstacked"}, "`state` must be one of this model"),
    ],
)
def test_refusals(model, kwargs, sentence):
    if "model" in kwargs:
        kwargs = {**kwargs, "model": eqx.tree_at(lambda m: m.mtp, model, None)}
    if "state" in kwargs:
        state = jax.vmap(lambda _: model.init_state(4))(jnp.arange(2 if "rows" in kwargs["state"] else 1))
        kwargs = {"state": jax.vmap(lambda s: s.unstack())(state) if kwargs["state"] == "unstacked" else state}
    with pytest.raises(ValueError, match=sentence):
        stream(kwargs.pop("model", model), [1, 2], **{"max_new_tokens": 6, **kwargs})
