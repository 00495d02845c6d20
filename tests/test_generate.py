"""Prefill, decode and sampling."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.generate import (
    GREEDY,
    NO_TOKEN,
    Sampler,
    _steps,
    _stream,
    decode,
    generate,
    keep,
    pad_prompts,
    prefill,
    sample,
    stream,
)
from deltanox.models import Qwen3_5Config, qwen3_5
from helpers import rel

CONFIG = Qwen3_5Config(
    vocab_size=37, embed_size=16, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
    key_head_size=8, value_head_size=4, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=24,
)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    """Weights large enough that the text isn't one token repeated."""
    model = qwen3_5(CONFIG, key=jax.random.key(3))
    return eqx.tree_at(lambda m: (m.embedding, m.head), model, (40 * model.embedding, 40 * model.head))


@eqx.filter_jit
def logits_of(model, tokens):
    return model(tokens)[0]


def greedy_by_full_passes(model, prompt, n):
    tokens = list(prompt)
    for _ in range(n):
        padded = jnp.asarray(tokens + [0] * (len(prompt) + n - len(tokens)))  # one compiled shape
        tokens.append(int(jnp.argmax(logits_of(model, padded)[len(tokens) - 1])))
    return tokens[len(prompt) :]


def test_greedy_is_the_argmax_of_full_passes(model):
    prompt = [5, 11, 2, 36, 0]
    want = greedy_by_full_passes(model, prompt, 12)
    assert len(set(want)) > 3
    np.testing.assert_array_equal(generate(model, prompt, max_new_tokens=12), want)
    np.testing.assert_array_equal(generate(model, jnp.array([prompt, prompt]), max_new_tokens=12), [want, want])


def test_compiles_once_for_many_tokens_and_prompts(model):
    """Prefill, too, for all lengths of a bucket."""

    def programs():
        return [f._cached._cache_size() for f in (_steps._prefill, _steps._next)]

    list(stream(model, range(5), max_new_tokens=3))
    before = programs()
    list(stream(model, range(17), max_new_tokens=20))
    list(stream(model, [1] * 30, max_new_tokens=30))
    assert programs() == before


@pytest.mark.parametrize(
    "length, wanted", [(1, 64), (64, 64), (65, 128), (1024, 1024), (1025, 2048), (2049, 4096), (5000, 6144)]
)
def test_buckets(length, wanted):
    assert _steps.bucket(length) == wanted


def test_a_token_costs_the_same_however_long_the_text(model):
    """FLOPs and bytes of the compiled step: it has no length in it, and a cache's slots are all that it grows by."""

    def cost(capacity):
        _, state = prefill(model, jnp.array([[1, 2, 3]]), capacity=capacity)
        step = _steps._next.lower((model, GREEDY, None, np.int32(1), np.zeros(1, bool), jnp.array([4])), state)
        found = step.compile().compiled.cost_analysis()
        return np.array([found["flops"], found["bytes accessed"]])

    costs = np.array([cost(capacity) for capacity in (64, 128, 192)])
    small, large = np.diff(costs, axis=0)
    np.testing.assert_allclose(small, large, rtol=0.05)  # linear in the slots
    products = 64 * 2 * 2 * CONFIG.num_heads * CONFIG.head_size  # of 64 more slots, with keys and with values
    assert products <= small[0] < 3 * products


def test_streams_tokens_as_they_come(model):
    tokens = stream(model, [5, 11, 2], max_new_tokens=1000, capacity=1002)
    first = [next(tokens) for _ in range(4)]
    assert all(token.shape == () and token.dtype == np.int32 for token in first)
    np.testing.assert_array_equal(first, generate(model, [5, 11, 2], max_new_tokens=4))


@pytest.mark.parametrize("side", ["left", "right"])
def test_ragged_rows_are_as_alone(model, side):
    prompts = [[5, 11, 2, 36, 0], [7], [1, 2, 3]]
    tokens, mask = pad_prompts(prompts, side=side)
    got = generate(model, tokens, mask=mask, max_new_tokens=8)
    for row, prompt in zip(got, prompts):
        np.testing.assert_array_equal(row, generate(model, prompt, max_new_tokens=8))


def test_stop_tokens_end_a_row_and_then_the_text(model):
    prompt = [5, 11, 2, 36, 0]
    text = greedy_by_full_passes(model, prompt, 12)
    stop = text[4]
    at = text.index(stop)
    np.testing.assert_array_equal(generate(model, prompt, max_new_tokens=12, stop_tokens=[stop]), text[: at + 1])
    other = [9, 9]
    alone = generate(model, other, max_new_tokens=12, stop_tokens=[stop])
    tokens, mask = pad_prompts([prompt, other])
    rows = generate(model, tokens, mask=mask, max_new_tokens=12, stop_tokens=[stop])
    length = max(at + 1, len(alone))
    assert rows.shape == (2, length)
    for row, want in zip(rows, (text[: at + 1], alone)):
        np.testing.assert_array_equal(row, [*want, *[NO_TOKEN] * (length - len(want))])


def test_sampling_is_a_function_of_the_key_and_of_no_other_row(getkey, model):
    key, sampler = getkey(), Sampler(temperature=1.5, top_k=20, top_p=0.95)

    def run(prompt, key=key, **kwargs):
        return generate(model, prompt, max_new_tokens=10, sampler=sampler, key=key, **kwargs)

    alone = run([5, 11, 2])
    np.testing.assert_array_equal(run([5, 11, 2]), alone)
    rows = run(jnp.array([[5, 11, 2], [5, 11, 2], [8, 8, 8]]))
    np.testing.assert_array_equal(rows[0], alone)
    assert (rows[1] != alone).any()
    assert (run([5, 11, 2], key=getkey()) != alone).any()


def numpy_keep(logits, top_k, top_p):
    """Ids that stay, in plain loops: sorted by logit, first k, then until p is reached."""
    order = np.argsort(-logits, kind="stable")[:top_k]
    weights = np.exp(logits[order] - logits[order].max())
    weights /= weights.sum()
    kept, total = [], 0.0
    for token, weight in zip(order, weights):
        kept.append(token)
        total += weight
        if total >= top_p:
            break
    return set(map(int, kept))


@pytest.mark.parametrize("top_k", [None, 1, 5, 29, 30])
@pytest.mark.parametrize("top_p", [1e-6, 0.3, 0.87, 1.0])
def test_top_k_and_top_p_keep_what_numpy_keeps(getkey, top_k, top_p):
    logits = 3 * jax.random.normal(getkey(), (2, 4, 30))
    kept = keep(logits, Sampler(top_k=top_k, top_p=top_p))
    for row, mask in zip(np.asarray(logits, np.float64).reshape(8, 30), np.asarray(kept).reshape(8, 30)):
        assert set(np.flatnonzero(np.isfinite(mask)).tolist()) == numpy_keep(row, top_k, top_p)
    np.testing.assert_array_equal(kept[np.isfinite(kept)], logits[np.isfinite(kept)])


def test_equal_logits_stay_together():
    logits = jnp.array([1.0, 2.0, 2.0, 0.0, 2.0])
    for sampler in (Sampler(top_k=2), Sampler(top_p=0.3)):
        np.testing.assert_array_equal(np.isfinite(keep(logits, sampler)), [False, True, True, False, True])
    assert int(sample(logits, GREEDY)) == 1


def test_frequencies_follow_the_softmax(getkey):
    logits = jnp.array([0.0, 1.0, 2.0, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        drawn = sample(jnp.broadcast_to(logits, (20_000, 4)), Sampler(temperature=temperature), key=getkey())
        got = np.bincount(np.asarray(drawn), minlength=4) / 20_000
        want = np.asarray(jax.nn.softmax(logits / temperature))
        assert np.abs(got - want).max() < 5 * 0.5 / 20_000**0.5  # five standard deviations


def test_prefill_and_decode_by_hand(getkey, model):
    tokens, mask = pad_prompts([[1, 2, 3, 4], [5, 6]], side="right")
    logits, state = prefill(model, jnp.asarray(tokens), jnp.asarray(mask), capacity=8)
    assert rel(logits[1], logits_of(model, jnp.array([5, 6]))[-1]) < 1e-5
    logits, state = decode(model, jnp.array([9, 10]), state)
    assert rel(logits[1], logits_of(model, jnp.array([5, 6, 10]))[-1]) < 1e-5
    assert state.capacity == 8


def test_nan_logits_are_an_error_and_no_token(model):
    broken = eqx.tree_at(lambda m: m.norm.weight, model, model.norm.weight.at[0].set(jnp.nan))
    with pytest.raises(FloatingPointError, match="logits of row 0 are NaN at new token 0"):
        generate(broken, [1, 2], max_new_tokens=3)
    assert int(sample(jnp.array([0.0, jnp.nan]), GREEDY)) == NO_TOKEN


@pytest.fixture
def unchecked():
    """Without the run-time type checker, whose own error would come first."""
    checker.update("jaxtyping_disable", True)
    yield
    checker.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "prompt, kwargs, sentence",
    [
        ([], {}, r"`prompt` must hold integers \[T\] or \[B T\], at least one token a row"),
        ([1.5, 2.0], {}, "`prompt` must hold integers"),
        ([1, 37], {}, r"`prompt` must hold ids in \[0, 37\), the model's vocabulary, but there is \[37\]"),
        ([1, -1], {}, r"`prompt` must hold ids in \[0, 37\).* \[-1\]"),
        ([1, 2], {"max_new_tokens": 0}, "`max_new_tokens` must be an integer of at least 1, but it is 0"),
        ([1, 2], {"max_new_tokens": 2.5}, "`max_new_tokens` must be an integer of at least 1, but it is 2.5"),
        ([1, 2], {"drafts": -1}, "`drafts` must be an integer of at least 0, but it is -1"),
        ([1, 2], {"capacity": 64.0}, "`capacity` must be an integer of at least 1, but it is 64.0"),
        ([[1, 2], [1]], {}, r"`prompt` must hold integers .*, but it is list: .* one array with pad_prompts"),
        ("text", {}, "`prompt` must hold integers .*: encode text with a tokenizer"),
        (None, {}, r"`prompt` must hold integers .*, but it is object\[\]"),
        ([1, 2**40], {}, "`prompt` must hold integers .* of 32 bits"),
        (np.zeros((0, 3), int), {}, "at least one token a row"),
        ([1, 2], {"sampler": 0.7}, r"`sampler` must be a Sampler, but it is a float: write Sampler\(temp"),
        ([1, 2], {"sampler": Sampler(), "key": 0}, r"`key` must be one of JAX's, but it is a int: write jax.random"),
        ([1, 2], {"state": (1, 2)}, "`state` must be what `prefill` or `load_state` returned, but it is a tuple"),
        ([1, 2], {"capacity": 6}, r"`capacity` must be at least .* = 7, but it is 6: raise it"),
        ([1, 2], {"mask": np.ones(3, bool)}, r"`mask` must be booleans of the prompt's shape \(2,\)"),
        ([1, 2], {"mask": np.zeros(2, bool)}, "every row of the prompt must have a real token"),
        ([1, 2], {"sampler": Sampler()}, "a `key` is needed at temperature 1.0"),
        ([1, 2], {"sampler": Sampler(top_k=38), "key": jax.random.key(0)}, "`top_k` must be at most .* 37"),
        ([1, 2], {"stop_tokens": [40]}, r"`stop_tokens` must hold ids in \[0, 37\)"),
        ([1, 2], {"stop_tokens": [2.7]}, "`stop_tokens` must hold integers"),
    ],
)  # fmt: skip
def test_requests_are_checked_before_anything_runs(unchecked, monkeypatch, model, prompt, kwargs, sentence):
    monkeypatch.setattr(_stream, "Stream", lambda *_, **__: pytest.fail("it ran"))
    with pytest.raises(ValueError, match=sentence):
        stream(model, prompt, **{"max_new_tokens": 6, **kwargs})


@pytest.mark.parametrize("tokens", [[1, 2], np.zeros(3, int), np.zeros((1, 0), int), np.zeros((1, 2)), [["a"]]])
def test_prefill_is_given_rows_of_tokens(unchecked, model, tokens):
    with pytest.raises(ValueError, match="prefill: `tokens` must (be an array|have|hold)"):
        prefill(model, tokens, capacity=8)


@pytest.mark.parametrize(
    "kwargs, sentence",
    [
        ({"temperature": -1.0}, "`temperature` must be a finite number of at least 0, but it is -1.0"),
        ({"temperature": float("nan")}, "`temperature` must be"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, or None"),
        ({"top_k": 1.5}, "`top_k` must be an integer of at least 1, or None"),
        ({"top_k": float("inf")}, "`top_k` must be an integer of at least 1, or None"),
        ({"top_p": 0.0}, "`top_p` must be above 0 and at most 1, but it is 0.0"),
        ({"top_p": 1.1}, "`top_p` must be above 0"),
    ],
)
def test_samplers_are_checked(unchecked, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        Sampler(**kwargs)


@pytest.mark.parametrize(
    "prompts, side, sentence",
    [
        ([], "left", r"lengths are \[\]"),
        ([[1], []], "left", r"lengths are \[1, 0\]"),
        ([[1], [1.7]], "left", r"every prompt must hold integers \[T\] of 32 bits, but it is float"),
        ([1, 2], "left", r"every prompt must hold integers \[T\]"),
        ([[2**40]], "left", "of 32 bits"),
        ([[1]], "middle", "`side` must be 'left' or 'right', but it is 'middle'"),
    ],
)
def test_padding_is_checked(unchecked, prompts, side, sentence):
    with pytest.raises(ValueError, match=sentence):
        pad_prompts(prompts, side=side)
