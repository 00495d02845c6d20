"""States are values: a rejected draft is undone by going on from the state before it, in every row from its own."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from deltanox.generate import Sampler, decode, generate, load_state, prefill, save_state
from deltanox.models import HybridState, Qwen3_5Config, qwen3_5
from deltanox.precision import Precision
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


def test_more_prompts_than_there_is_room_for(model):
    """Going on from a state with too little room is refused, and inside jit no later call hides the lost tokens."""
    _, state = prefill(model, draw(0, 1, 6), capacity=8)
    with pytest.raises(ValueError, match="`capacity` must be at least 6 . 4 = 10"):
        prefill(model, draw(1, 1, 4), capacity=9, state=state)

    @eqx.filter_jit
    def inside(state):
        state = prefill(model, draw(1, 1, 4), capacity=9, state=state)[1]
        return prefill(model, draw(2, 1, 2), capacity=64, state=state)

    logits, lost = inside(state)
    assert np.isnan(logits).all()
    with pytest.raises(ValueError, match="prefill again"):
        prefill(model, draw(1, 1, 4), capacity=64, state=lost)


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


@pytest.mark.parametrize("form", ["stacked", "unstacked"])
def test_snapshots_of_one_call(model, form):
    """Rows 48 and 49: one call with states kept after 0, 1, 3 and 5 of its tokens; each row goes back to its own."""
    model = model.unstack() if form == "unstacked" else model
    start = prefill(model, draw(3, 3, 5), capacity=CAPACITY)[1]
    tokens, after, index = draw(4, 3, 5), draw(5, 3, 2), jnp.asarray([0, 2, 3])
    counts = (0, 1, 3, 5)

    @eqx.filter_jit
    def call(model, tokens, state):
        return jax.vmap(lambda tokens, state: model(tokens, state, snapshots=counts))(tokens, state)

    logits, snapshots = call(model, tokens, start)
    for found, (wanted, _) in zip(jnp.moveaxis(logits, 1, 0), walk(model, start, tokens)):
        assert rel(found, wanted) < 1e-5
    state = jax.vmap(HybridState.crop)(snapshots, index)
    got = walk(model, state, after)
    for row, i in enumerate(index):
        one = jax.tree.map(lambda x, row=row: x[row : row + 1], start)
        count = counts[int(i)]
        alone = walk(model, one, jnp.concatenate([tokens[row : row + 1, :count], after[row : row + 1]], axis=1))
        assert rel(got[-1][0][row], alone[-1][0][0]) < 1e-5
        for a, b in zip(jax.tree.leaves(got[-1][1]), jax.tree.leaves(alone[-1][1])):
            # keys and values beyond the length are of tokens that were taken back: nobody sees them
            if a.ndim < 4 or CAPACITY not in a.shape:
                assert rel(np.asarray(a[row], float), np.asarray(b[0], float)) < 1e-5


def test_snapshots_of_layers(getkey, model):
    """Of mixers and a stack, with padding: the state after some tokens is that of a call with so many of them."""
    x, mask = jax.random.normal(getkey(), (7, 16)), jnp.asarray([False, True, True, True, True, True, False])
    counts = (4, 7)
    call = eqx.filter_jit(lambda layer, *args, **kwargs: layer(*args, **kwargs))
    for layer, state in ((model.layers[0].blocks[0].mixer, None), (model.layers, model.layers.init_state(10))):
        y, kept, *_ = call(layer, x, state, mask=mask, snapshots=counts)
        assert rel(y, call(layer, x, state, mask=mask)[0]) < 1e-5
        for i, count in enumerate(counts):
            wanted = call(layer, x[:count], state, mask=mask[:count])[1]
            for a, b in zip(jax.tree.leaves(kept.crop(i)), jax.tree.leaves(wanted)):
                if 10 not in a.shape or a.dtype == bool:
                    assert rel(np.asarray(a, float), np.asarray(b, float)) < 1e-5


def test_overflow_stays_after_a_crop(model):
    attention = model.layers[0].blocks[1].mixer
    x = jnp.ones((3, 16))
    _, full = attention(x, attention.init_state(4))
    y, kept = attention(x, full, snapshots=(1, 3))
    assert np.isnan(np.asarray(y)).all() and np.isnan(np.asarray(attention(x[:1], kept.crop(0))[0])).all()


@pytest.mark.parametrize(
    "snapshots, kwargs, sentence",
    [
        ((), {}, r"`snapshots` must be increasing numbers of tokens from 0 to T = 3, but it is \(\)"),
        ((2, 1), {}, r"`snapshots` must be increasing .* \(2, 1\)"),
        ((1, 4), {}, r"from 0 to T = 3, but it is \(1, 4\)"),
        ((1,), {"segment_ids": jnp.array([0, 0, 1])}, "`snapshots` are of one document .* but `segment_ids` is given"),
    ],
)
def test_snapshots_are_checked(model, snapshots, kwargs, sentence):
    for block in model.layers[0].blocks:
        with pytest.raises(ValueError, match=sentence):
            block.mixer(jnp.ones((3, 16)), snapshots=snapshots, **kwargs)
    with pytest.raises(ValueError, match="the state has no snapshots: ask the call that makes it"):
        model.init_state(4).crop(0)


@pytest.mark.parametrize("at", [1, 2, 3, 4, 63, 64, 65, 70])
def test_a_prefix_is_read_once(model, at):
    """Row 50: going on from a state that was kept at the end of a chunk, and beside one."""
    tokens = draw(6, 1, 100)
    whole, state = prefill(model, tokens, capacity=CAPACITY)
    _, kept = prefill(model, tokens[:, :at], capacity=CAPACITY)

    for _ in range(2):  # the kept state is as good the second time
        logits, end = prefill(model, tokens[:, at:], capacity=CAPACITY, state=kept)
        assert rel(logits, whole) < 1e-5
        for a, b in zip(jax.tree.leaves(end.blocks[0]), jax.tree.leaves(state.blocks[0])):
            assert rel(a, b) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_state_in_a_file(tmp_path, model, dtype):
    """What goes on from the file is what goes on from memory, bit for bit."""
    model = Precision(compute=dtype).cast_compute(model)
    _, state = prefill(model, draw(7, 2, 9), capacity=16)
    save_state(tmp_path / "state", state, model)
    (tmp_path / "other").touch()
    assert (tmp_path / "state").stat().st_mode == (tmp_path / "other").stat().st_mode  # as umask has it
    (tmp_path / "other").unlink()
    again = load_state(tmp_path / "state", model)
    assert jax.tree.structure(again) == jax.tree.structure(state) and equal(again, state)
    assert [x.dtype for x in jax.tree.leaves(again)] == [x.dtype for x in jax.tree.leaves(state)]
    assert [path.name for path in tmp_path.iterdir()] == ["state"]
    options = dict(max_new_tokens=4, sampler=Sampler(), key=jax.random.key(1))
    texts = [generate(model, draw(8, 2, 3), state=s, **options) for s in (state, again)]
    np.testing.assert_array_equal(*texts)


def test_files_that_are_refused(tmp_path, model):
    file = tmp_path / "state"
    _, state = prefill(model, draw(7, 2, 9), capacity=16)
    save_state(file, state, model)

    def other(**changes):
        return jax.eval_shape(lambda: qwen3_5(dataclasses.replace(CONFIG, **changes), key=jax.random.key(0)))

    cases = [
        (other(value_head_size=16), r"`.blocks\[0\].conv` is float32\[2, 2, 3, 160\] in `.*`, but float32\[2, 2, 3, 128\]"),
        (other(num_layers=2), r"`.blocks\[0\].conv` is .*\[2, 2, 3, 160\] in `.*`, but .*\[2, 1, 3, 160\] in a state of this"),
        (other(full_attention_interval=4), r"`.blocks\[0\].conv` is "),
        (Precision(compute="bfloat16").cast_compute(model), r"`.blocks\[0\].conv` is float32.*, but bfloat16"),
        (model.unstack(), r"`.blocks\[0\].conv` is .*stacked or not as then"),
        (eqx.tree_at(lambda m: m.norm.weight, model, model.norm.weight + 1), r"other weights: `.norm.weight` of the model"),
    ]  # fmt: skip
    for changed, sentence in cases:
        with pytest.raises(ValueError, match="load_state: .*" + sentence):
            load_state(file, changed)
    with pytest.raises(ValueError, match=r"save_state: `.blocks\[0\].conv` is .* in the state, but"):
        save_state(tmp_path / "other", jax.tree.map(lambda x: x[:, 0], state), model)
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(ValueError, match="load_state: `.*state` is damaged: .*; write it again with save_state"):
        load_state(file, model)
    save_file({"x": np.zeros(2)}, file)
    with pytest.raises(ValueError, match="load_state: `.*state` is no state that save_state wrote"):
        load_state(file, model)
    with pytest.raises(ValueError, match="load_state: there is no file"):
        load_state(tmp_path / "none", model)


def test_a_file_without_an_array(tmp_path, model):
    _, state = prefill(model, draw(7, 1, 2), capacity=2)
    save_state(tmp_path / "state", state, model)
    with safe_open(tmp_path / "state", "numpy") as opened:
        metadata, arrays = opened.metadata(), {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    gone = arrays.pop(".blocks[1].length")
    save_file(arrays, tmp_path / "state", metadata)
    with pytest.raises(ValueError, match=r"`.blocks\[1\].length` is missing in `"):
        load_state(tmp_path / "state", model)
    save_file({**arrays, ".blocks[1].length": gone, "more": gone}, tmp_path / "state", metadata)
    with pytest.raises(ValueError, match=r"`more` is int32\[1, 2\] in `.*`, but not there in a state of this model"):
        load_state(tmp_path / "state", model)
