"""The language model as a whole: states, packing, padding, gradients, dtypes, batches."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import config as checker

from deltanox.models import HybridLM, Qwen3_5Config, qwen3_5
from deltanox.nn import KVCache
from deltanox.precision import Precision
from helpers import rel

VOCABULARY = 61
CONFIG = Qwen3_5Config(
    vocab_size=VOCABULARY, embed_size=24, num_layers=4, full_attention_interval=2, num_key_heads=2, num_value_heads=4,
    key_head_size=8, value_head_size=12, num_heads=4, num_kv_heads=2, head_size=16, mlp_size=40, tied_head=True,
)  # fmt: skip
UNTIED = Qwen3_5Config(**{**CONFIG.__dict__, "tied_head": False})
SPARSE = Qwen3_5Config(
    **{**CONFIG.__dict__, "mlp_size": 0, "num_experts": 4, "top_k": 2, "expert_size": 8, "shared_size": 8}
)
CLOSE = 1e-5


def make(config, seed):
    """A model whose norms and gates aren't at their neutral start, so that a forgotten one shows; filled by numpy,
    which compiles nothing."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path)
        noise = 0.1 * rng.standard_normal(leaf.shape)
        if name.endswith("A_log"):
            noise = np.log(rng.uniform(0.01, 16, leaf.shape))
        elif name.endswith(("dt_bias", "mixer.norm.weight")):
            noise += 1
        return jnp.asarray(noise, leaf.dtype)

    skeleton = eqx.filter_eval_shape(qwen3_5, config, key=jax.random.key(0))
    arrays, static = eqx.partition(skeleton, lambda x: isinstance(x, jax.ShapeDtypeStruct))
    return eqx.combine(jax.tree_util.tree_map_with_path(fill, arrays), static)


@pytest.fixture(scope="module")
def model():
    return make(CONFIG, 0)


@pytest.fixture(scope="module")
def sparse():
    return make(SPARSE, 1)


@eqx.filter_jit
def run(model, tokens, state=None, **kwargs):
    return model(tokens, state, **kwargs)


def draw(getkey, *shape):
    return jax.random.randint(getkey(), shape, 0, VOCABULARY)


def memory(state):
    """What must agree between two ways of reading the same tokens: all but the caches' layout in slots."""
    for block in state.blocks:
        yield from [block.position] if isinstance(block, KVCache) else jax.tree.leaves(block)


# Compiling is what takes the time: most tests read sequences of 12 tokens, or 1, 4 and 7 into caches of 16 slots.


@pytest.mark.parametrize(
    "kind, parts",
    [
        ("model", [1] * 12),
        ("model", [4, 4, 4]),
        ("model", [7, 1, 4]),
        ("model", [1, 7, 4]),
        ("sparse", [4, 1, 1, 1, 4, 1]),
    ],
)
def test_prefill_in_any_split_then_decode_equals_one_pass(request, getkey, kind, parts):
    model = request.getfixturevalue(kind)
    tokens = draw(getkey, 12)
    want, end = run(model, tokens)
    state, logits, at = model.init_state(16), [], 0
    for part in parts:
        some, state = run(model, tokens[at : at + part], state)
        logits, at = [*logits, some], at + part
    assert rel(jnp.concatenate(logits), want) < CLOSE
    for got, expected in zip(memory(state), memory(end), strict=True):
        assert rel(got, expected) < CLOSE


def test_a_returned_state_goes_on_when_resized(getkey, model):
    tokens = draw(getkey, 13)
    _, state = run(model, tokens[:12])
    assert state.capacity == 12
    got, after = run(model, tokens[12:], state.resize(16))
    assert after.capacity == 16
    _, roomy = run(model, tokens[:12], model.init_state(16))
    want, _ = run(model, tokens[12:], roomy)
    assert rel(got, want) < CLOSE
    overflowed, _ = run(model, tokens[12:], state)
    assert np.isnan(overflowed).all()


def test_packed_equals_separate(getkey, model):
    lengths = [4, 1, 7]
    tokens = draw(getkey, 12)
    ids = jnp.array([3] * 4 + [0] + [3] * 7)
    packed, state = run(model, tokens, segment_ids=ids)
    ends = np.cumsum(lengths)
    for begin, stop in zip([0, *ends], ends):
        separate, last = run(model, tokens[begin:stop], model.init_state(16))
        assert rel(packed[begin:stop], separate) < CLOSE
    for got, want in zip(memory(state), memory(last), strict=True):
        assert rel(got, want) < CLOSE
    # what a document says is nothing to the next, bit for bit
    changed, _ = run(model, tokens.at[2].set((tokens[2] + 1) % VOCABULARY), segment_ids=ids)
    assert np.abs(np.asarray(changed - packed))[2:4].min(-1).max() > 0
    np.testing.assert_array_equal(changed[4:], packed[4:])


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["model", "sparse"])
def test_padded_equals_unpadded(request, getkey, kind, side):
    model = request.getfixturevalue(kind)
    tokens = draw(getkey, 4)
    pads = jnp.full(8, -7)  # ids outside the vocabulary: nothing looks at them
    padded = jnp.concatenate([pads, tokens] if side == "left" else [tokens, pads])
    real = slice(8, None) if side == "left" else slice(0, 4)
    want, end = run(model, tokens, model.init_state(16))
    got, state = run(model, padded, model.init_state(16), mask=padded >= 0)
    assert np.isfinite(got).all()
    assert rel(got[real], want) < CLOSE
    for a, b in zip(memory(state), memory(end), strict=True):
        assert rel(a, b) < CLOSE
    for token in draw(getkey, 3):
        want, end = run(model, token[None], end)
        got, state = run(model, token[None], state)
        assert rel(got, want) < CLOSE


def total_loss(model, tokens, mask=None):
    hidden, _, _ = model.hidden(tokens, mask=mask)
    losses = jax.nn.logsumexp(model.logits(hidden), axis=-1)
    return (losses if mask is None else jnp.where(mask, losses, 0.0)).sum()


# what the compiler leaves undone doesn't matter here, and compiling takes half the time
gradient = eqx.filter_jit(eqx.filter_grad(total_loss), compiler_options={"xla_backend_optimization_level": 0})


@pytest.fixture(scope="module")
def untied():
    return make(UNTIED, 3)


def check_gradient(got, want=None):
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(got if want is None else want), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(a).all(), name
        assert np.isfinite(b).all(), name
        assert np.abs(np.asarray(a)).max() > 0, name
        assert rel(a, b) < 1e-4, name


def test_gradients_are_finite_and_reach_every_leaf_padded_or_not(getkey, untied):
    tokens = draw(getkey, 6)
    padded = jnp.concatenate([jnp.full(5, VOCABULARY + 3), tokens])
    check_gradient(gradient(untied, padded, jnp.arange(11) >= 5), gradient(untied, tokens))


def test_gradients_reach_every_expert(getkey, sparse):
    check_gradient(gradient(sparse, draw(getkey, 11), jnp.arange(11) < 9))


@pytest.mark.slow
def test_gradients_stay_in_their_document(untied):
    """The first document's rows of an untied embedding get nothing from the second one's loss, exactly."""
    ids, tokens = jnp.array([0, 0, 0, 1, 1, 1]), jnp.arange(6)

    def loss(model):
        hidden, _, _ = model.hidden(tokens, segment_ids=ids)
        return (hidden[3:] ** 2).sum()

    grad = eqx.filter_jit(eqx.filter_grad(loss))(untied).embedding
    np.testing.assert_array_equal(grad[:3], 0)
    assert (np.abs(np.asarray(grad[3:6])).max(-1) > 0).all()


def test_options_reach_the_layers():
    model = eqx.filter_eval_shape(
        qwen3_5, CONFIG, implementation="chunked", remat=True, state_dtype="bfloat16", key=jax.random.key(0)
    )
    delta = model.layers.layers.blocks[0].mixer
    assert (model.layers.remat, delta.implementation, delta.state_dtype) == (True, "chunked", jnp.dtype("bfloat16"))


def test_implementations_agree(getkey, model):
    tokens = draw(getkey, 12)
    reference = eqx.filter_eval_shape(qwen3_5, CONFIG, implementation="reference", key=jax.random.key(0))
    reference = jax.tree.unflatten(jax.tree.structure(reference), jax.tree.leaves(model))
    assert rel(run(model, tokens)[0], run(reference, tokens)[0]) < CLOSE


def test_a_tied_head_is_one_array_with_the_gradients_of_both_uses(getkey, untied):
    untied = eqx.tree_at(lambda m: m.head, untied, untied.embedding)
    tied = eqx.tree_at(lambda m: m.head, untied, None)
    assert len(jax.tree.leaves(tied)) == len(jax.tree.leaves(untied)) - 1
    tokens = draw(getkey, 6)
    assert tied.head_weight is tied.embedding
    assert untied.head_weight is untied.head
    one, two = gradient(tied, tokens), gradient(untied, tokens)
    assert np.abs(np.asarray(two.embedding)).max() > 0
    assert np.abs(np.asarray(two.head)).max() > 0
    assert rel(one.embedding, two.embedding + two.head) < CLOSE


def test_a_batch_is_a_vmap(getkey, sparse):
    tokens = draw(getkey, 3, 8)
    ids = jnp.array([[0] * 8, [0, 0, 1, 1, 1, 2, 2, 2], [5, 5, 5, 5, 5, 5, 5, 0]])
    mask = jnp.array([[True] * 8, [False] * 3 + [True] * 5, [True] * 6 + [False] * 2])
    states = [run(sparse, tokens, sparse.init_state(16))[1] for tokens in draw(getkey, 3, 4)]
    state = jax.tree.map(lambda *x: jnp.stack(x), *states)

    @eqx.filter_jit
    def batch(model, tokens, state, ids, mask):
        return jax.vmap(lambda t, s, i, m: model(t, s, segment_ids=i, mask=m))(tokens, state, ids, mask)

    logits, after = batch(sparse, tokens, state, ids, mask)
    for row in range(3):
        alone, own = run(
            sparse, tokens[row], jax.tree.map(lambda x, row=row: x[row], state), segment_ids=ids[row], mask=mask[row]
        )
        assert rel(logits[row], alone) < CLOSE
        for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(own), strict=True):
            assert rel(a[row], b) < CLOSE


@pytest.mark.all_passes
def test_explicit_positions_pass_through(getkey, model):
    tokens, count = draw(getkey, 12), jnp.arange(12)
    default, _ = run(model, tokens)
    np.testing.assert_array_equal(run(model, tokens, positions=count)[0], default)
    assert rel(run(model, tokens, positions=count * 3)[0], default) > 1e-4
    sections = make(Qwen3_5Config(**{**CONFIG.__dict__, "rotary_fraction": 0.5, "mrope_sections": (2, 1, 1)}), 0)
    text, _ = run(sections, tokens)
    np.testing.assert_array_equal(run(sections, tokens, positions=jnp.broadcast_to(count, (3, 12)))[0], text)
    image = jnp.stack([count // 4, count // 2, count % 2])
    got, _ = run(sections, tokens, positions=image)
    assert rel(got, text) > 1e-4
    # positions that repeat or go back are not taken for packed documents
    assert rel(got, run(sections, tokens, positions=image, segment_ids=jnp.zeros(12, int))[0]) < CLOSE


def test_bfloat16_activations_float32_logits_and_states(getkey, model):
    cast = Precision(compute="bfloat16").cast_compute(model)
    tokens = draw(getkey, 12)
    logits, state = run(cast, tokens)
    assert logits.dtype == jnp.float32
    mixer = cast.layers.layers.blocks[0].mixer
    assert {x.dtype for x in (mixer.A_log, mixer.dt_bias, mixer.norm.weight)} == {jnp.dtype("float32")}
    assert mixer.conv.weight.dtype == jnp.bfloat16
    assert jax.eval_shape(lambda: cast.hidden(tokens)[0]).dtype == jnp.bfloat16
    delta, cache = state.blocks
    assert cache.key.dtype == jnp.bfloat16
    assert {x.dtype for x in jax.tree.leaves(delta)} == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    assert rel(logits, run(model, tokens)[0]) < 0.1  # four layers of bfloat16, on weights that are far from small


def test_routers_are_summed_over_layers_and_real_tokens(getkey, sparse):
    stats = eqx.filter_jit(lambda model, tokens, mask: model.hidden(tokens, mask=mask)[2])(
        sparse, draw(getkey, 9), jnp.arange(9) >= 2
    )
    assert float(stats.rows) == 7 * 4
    assert float(stats.counts.sum()) == 7 * 4 * 2
    assert abs(float(stats.probs.sum()) - 7 * 4) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sixty_four_decoded_tokens_equal_prefill(getkey, model, dtype):
    """Row 53: logits and argmax in float32; in bfloat16 the divergence between the two distributions."""
    model = Precision(compute=dtype).cast_compute(model)
    tokens = draw(getkey, 80)

    @eqx.filter_jit
    def decode_all(model, tokens):
        first, state = model(tokens[:16], model.init_state(80))

        def step(state, token):
            logits, state = model(token[None], state)
            return state, logits[0]

        return jnp.concatenate([first, jax.lax.scan(step, state, tokens[16:])[1]])

    got, want = decode_all(model, tokens), run(model, tokens)[0]
    if dtype == "float32":
        assert rel(got, want) < CLOSE
        np.testing.assert_array_equal(got.argmax(-1), want.argmax(-1))
    else:
        p, q = jax.nn.log_softmax(want), jax.nn.log_softmax(got)
        divergence = np.asarray((jnp.exp(p) * (p - q)).sum(-1))
        print(f"divergence: mean {divergence.mean():.1e}, largest {divergence.max():.1e}")
        assert divergence.mean() < 3e-4
        assert divergence.max() < 5e-3


@pytest.mark.slow
def test_two_thousand_left_padded_tokens_in_four_parts(getkey, model):
    """Row 54: the parts of a padded prompt, one of them padding alone, equal one pass over its tokens."""
    tokens, padding = draw(getkey, 1400), 600
    padded = jnp.concatenate([jnp.zeros(padding, int), tokens])
    mask = jnp.arange(2000) >= padding
    state, parts = model.init_state(2000), []
    for at in range(0, 2000, 500):
        logits, state = run(model, padded[at : at + 500], state, mask=mask[at : at + 500])
        parts.append(logits)
    want, end = run(model, tokens)
    assert rel(jnp.concatenate(parts)[padding:], want) < CLOSE
    for a, b in zip(memory(state), memory(end), strict=True):
        assert rel(a, b) < CLOSE


@pytest.mark.parametrize("token", [-1, VOCABULARY, 2**30])
def test_a_token_outside_the_vocabulary_is_nan(getkey, model, token):
    logits, _ = run(model, draw(getkey, 12).at[3].set(token))
    assert np.isnan(logits[3:]).all()


@pytest.fixture(scope="module")
def wide():
    """Heads of 32 and more: below, XLA's CPU code sums over a head in another order when the shapes around it
    change."""
    config = {
        **CONFIG.__dict__, "embed_size": 64, "num_layers": 4, "full_attention_interval": 4, "mlp_size": 96,
        "key_head_size": 32,
        "value_head_size": 48, "head_size": 64,
    }  # fmt: skip
    return make(Qwen3_5Config(**config), 2)


def test_logits_do_not_depend_on_the_rows_beside_them(getkey, wide):
    tokens = draw(getkey, 8, 100)
    one, many = (eqx.filter_jit(lambda model, t: jax.vmap(model)(t)[0])(wide, t) for t in (tokens[:1], tokens))
    np.testing.assert_array_equal(one[0], many[0])


@pytest.mark.all_passes
def test_logits_do_not_depend_on_the_tokens_after_them(getkey, wide):
    tokens = draw(getkey, 200)
    np.testing.assert_array_equal(run(wide, tokens[:100])[0], run(wide, tokens)[0][:100])


@pytest.fixture
def unchecked():
    """Without the run-time type checker, whose own error would come first."""
    checker.update("jaxtyping_disable", True)
    yield
    checker.update("jaxtyping_disable", False)


@pytest.mark.parametrize(
    "tokens, kwargs, sentence",
    [
        (jnp.zeros((2, 5), int), {}, r"`tokens` must be .* int32\[2, 5\]: map a batch with jax.vmap"),
        (jnp.zeros(5), {}, r"`tokens` must be integers \[T\], but it is float32\[5\]"),
        (jnp.zeros(5, int), {"mask": jnp.ones((1, 5), bool)}, r"`mask` must be .* int32\[5\], but .* bool\[1, 5\]"),
        (jnp.zeros(5, int), {"segment_ids": jnp.zeros(4, int)}, r"`segment_ids` must be \[T\] like tokens"),
        (jnp.zeros(5, int), {"positions": jnp.zeros((5, 3), int)}, r"`positions` must be \[T\] or \[3 T\]"),
    ],
)  # fmt: skip
def test_wrong_shapes_are_named(unchecked, model, tokens, kwargs, sentence):
    with pytest.raises(ValueError, match=sentence):
        model(tokens, **kwargs)


@pytest.mark.parametrize("kind", ["model", "sparse"])
def test_unstacked(request, getkey, kind):
    """Every block by itself: the same logits, the same memory, in blocks."""
    model = request.getfixturevalue(kind)
    flat, tokens = model.unstack(), draw(getkey, 9)
    assert len(flat.layers.blocks) == 4 and flat.unstack() is flat
    (want, state), (got, found) = (run(m, tokens, m.init_state(16)) for m in (model, flat))
    assert rel(got, want) < CLOSE
    for a, b in zip(jax.tree.leaves(state.unstack()), jax.tree.leaves(found), strict=True):
        assert a.shape == b.shape and rel(np.asarray(a, float), np.asarray(b, float)) < CLOSE
    with pytest.raises(ValueError, match="`remat` is for a model with stacked layers, and this one is unstacked"):
        flat(tokens, remat=True)


def test_wrong_sizes_are_named(unchecked, model):
    with pytest.raises(ValueError, match="`capacity` must be at least 1, but it is 0"):
        model.init_state(0)
    with pytest.raises(ValueError, match="`vocab_size` must be at least 1, but it is 0"):
        HybridLM(0, 3, lambda key: None, 1, tied_head=True, dtype=jnp.float32, key=jax.random.key(0))
