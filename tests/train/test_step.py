"""Loss, optimiser and step."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from deltanox import remat
from deltanox.models import Qwen3_5Config, qwen3_5
from deltanox.precision import Precision
from deltanox.train import (
    Batch,
    Document,
    OptimiserConfig,
    decay_mask,
    init_state,
    learning_rate_schedule,
    make_evaluation,
    make_optimiser,
    make_step,
    next_token_loss,
    repeat_step,
    validation_batches,
)
from helpers import rel
from tiny_model import TinyConfig, TinyModel


def batch_of(sizes, row_length, batch_size):
    rng = np.random.default_rng(0)
    docs = [Document(str(i), rng.integers(0, 256, n, np.uint8).tobytes()) for i, n in enumerate(sizes)]
    (batch,) = validation_batches(docs, row_length, batch_size)
    return jax.tree.map(jnp.asarray, batch)


@pytest.mark.parametrize("tied", [False, True])
def test_loss_of_packed_rows_is_that_of_the_documents(tied, getkey):
    """Sums over packed rows equal those of each document alone, and masked places have no part in them."""
    model = TinyModel(TinyConfig(tied=tied), key=getkey())
    batch = batch_of([9, 5, 9], 30, 1)
    assert not batch.mask.all()
    loss = eqx.filter_jit(next_token_loss)
    sums = loss(model, batch)
    singles = [loss(model, batch_of_one) for batch_of_one in alone(batch)]
    assert int(sums.tokens) == 26 == sum(int(s.tokens) for s in singles)
    assert int(sums.bytes) == 23
    assert rel(sums.nats, sum(s.nats for s in singles)) < 1e-6
    dirty = batch._replace(labels=jnp.where(batch.mask, batch.labels, 7))
    assert loss(model, dirty).nats == sums.nats


def test_a_batch_without_labels_changes_nothing(getkey):
    """All of it is padding: the loss is 0, and not 0 / 0, which would make every parameter NaN."""
    model = TinyModel(TinyConfig(), key=getkey())
    state, static, optimiser = init_state(model, lambda _: optax.sgd(0.1), key=getkey())
    batch = batch_of([9, 5, 9], 30, 1)
    empty = jax.tree.map(lambda x: x[None], batch._replace(mask=jnp.zeros_like(batch.mask)))
    for bytes_per_token in (None, 3.0):
        step = make_step(static, optimiser, lambda step: jnp.float32(0.1), Precision(), bytes_per_token=bytes_per_token)
        after, metrics = jax.jit(step)(state, empty)
        assert metrics.loss == metrics.bits_per_byte == metrics.gradient_norm == 0
        for old, new in zip(*map(jax.tree.leaves, (state.parameters, after.parameters))):
            np.testing.assert_array_equal(old, new)


def test_a_policy_that_the_model_does_not_take_is_refused(getkey):
    model = TinyModel(TinyConfig(), key=getkey())
    with pytest.raises(
        ValueError, match=r"remat: `TinyModel.hidden` takes no argument `remat`.*leave out the section \[remat\]"
    ):
        next_token_loss(model, batch_of([9, 5, 9], 30, 1), remat=remat.nothing)


def alone(batch):
    for row in range(batch.tokens.shape[0]):
        for segment in np.unique(batch.segment_ids[row]):
            here = np.asarray((batch.segment_ids[row] == segment) & batch.mask[row])
            if here.any():
                yield Batch(*(x[row][here][None] for x in batch[:3]))


def test_schedule():
    schedule = learning_rate_schedule(OptimiserConfig(learning_rate=2.0, warmup_steps=4, final_learning_rate=0.1), 21)
    with jax.numpy_dtype_promotion("standard"):
        rates = [float(schedule(i)) for i in range(21)]
    np.testing.assert_allclose(rates[:5], [0.4, 0.8, 1.2, 1.6, 2.0], rtol=1e-6)
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    np.testing.assert_allclose(rates[12], 1.1, rtol=1e-6)  # half of the cosine
    np.testing.assert_allclose(rates[20], 0.2, rtol=1e-6)


def test_decay_mask_goes_by_layer(getkey):
    class Norm(eqx.Module):
        weight: jax.Array

    class Layer(eqx.Module):
        proj: eqx.nn.Linear
        norm: Norm
        A_log: jax.Array
        experts_down: jax.Array

    class Model(eqx.Module):
        embedding: jax.Array
        layers: Layer
        head: jax.Array | None

    def layer(key):
        # In a stack every array has one axis more: a norm's weight looks like a matrix.
        return Layer(eqx.nn.Linear(3, 4, key=key), Norm(jnp.ones(3)), jnp.ones(2), jnp.ones((2, 3, 4)))

    layers = eqx.filter_vmap(layer)(jax.random.split(getkey(), 5))
    mask = decay_mask(Model(jnp.ones((7, 3)), layers, jnp.ones((7, 3))))
    decayed = {jax.tree_util.keystr(path) for path, value in jax.tree_util.tree_leaves_with_path(mask) if value}
    assert decayed == {".layers.proj.weight", ".layers.experts_down", ".head"}
    assert decay_mask(Model(jnp.ones((7, 3)), layers, None)).head is None


@pytest.mark.parametrize("experts", [0, 4])
def test_decay_mask_of_the_models(experts, getkey):
    sizes = dict(
        vocab_size=257, embed_size=8, num_layers=4, num_key_heads=1, num_value_heads=2, num_heads=2, num_kv_heads=1
    )
    sizes |= dict(num_experts=4, top_k=2, expert_size=8, shared_size=8) if experts else dict(mlp_size=8)
    model = eqx.filter_eval_shape(qwen3_5, Qwen3_5Config(**sizes, tied_head=bool(experts)), key=getkey())
    names = {True: set(), False: set()}
    for path, decays in jax.tree_util.tree_leaves_with_path(decay_mask(model)):
        name = jax.tree_util.keystr(path).split("mixer.")[-1].split("mlp.")[-1]
        names[decays].add("norm" if name.endswith("norm.weight") else name)
    projections = {
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "out_proj",
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
    }
    if experts:
        projections |= {"gate", "shared_expert_gate"} | {
            f"shared_expert.{part}_proj" for part in ("gate", "up", "down")
        }
        matrices = {".experts_gate_up", ".experts_down"}
    else:
        projections |= {"gate_proj", "up_proj", "down_proj"}
        matrices = {".head"}
    matrices = {name.removeprefix(".") if experts else name for name in matrices}
    assert names[True] == {f"{name}.weight" for name in projections} | matrices
    assert names[False] == {".embedding", "norm", "A_log", "dt_bias", "conv.weight"}


def test_weight_decay_and_clipping():
    """With a gradient of zero only decayed arrays move, by the rate times the decay."""
    parameters = {"head": jnp.ones((2, 2)), "embedding": jnp.ones((2, 2))}

    class Model(eqx.Module):
        head: jax.Array
        embedding: jax.Array

    model = Model(**parameters)
    config = OptimiserConfig(learning_rate=0.5, warmup_steps=0, weight_decay=0.1)
    optimiser = make_optimiser(config, 10, model)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        state = optimiser.init(model)
        updates, _ = optimiser.update(jax.tree.map(jnp.zeros_like, model), state, model)
    np.testing.assert_allclose(updates.head, -0.05, rtol=1e-6)
    np.testing.assert_array_equal(updates.embedding, 0)


def reference_update(model, batch, config, steps):
    """The first update in NumPy-like steps: clip, Adam, decay. Here with Optax's own parts, one by one."""

    def loss(model):
        sums = next_token_loss(model, batch)
        return sums.nats / sums.tokens.astype(jnp.float32)

    value, gradient = eqx.filter_value_and_grad(loss)(model)
    norm = np.sqrt(sum(np.square(np.asarray(g, np.float64)).sum() for g in jax.tree.leaves(gradient)))
    scale = min(1.0, config.clip_norm / norm)
    rate = config.learning_rate / (config.warmup_steps + 1)
    mask = decay_mask(eqx.filter(model, eqx.is_inexact_array))

    def update(p, g, decays):
        g = np.asarray(g, np.float64) * scale
        p = np.asarray(p, np.float64)
        return p - rate * (g / (np.abs(g) + config.epsilon) + decays * config.weight_decay * p)

    new = jax.tree.map(update, eqx.filter(model, eqx.is_inexact_array), gradient, mask)
    return float(value), norm, new


@pytest.mark.parametrize("parts", [1, 3])
def test_step_against_the_formula(parts, getkey):
    """Clipped AdamW's first update from the formula; accumulation over parts equals one large batch."""
    model = TinyModel(TinyConfig(), key=getkey())
    config = OptimiserConfig(learning_rate=0.1, warmup_steps=1, clip_norm=0.01, weight_decay=0.3, epsilon=1e-3)
    batch = batch_of([40, 30, 20], 16, 6)
    state, static, optimiser = init_state(model, lambda p: make_optimiser(config, 10, p), key=getkey())
    step = jax.jit(make_step(static, optimiser, learning_rate_schedule(config, 10), Precision()))
    parted = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)
    new, metrics = step(state, parted)
    loss, norm, wanted = reference_update(model, batch, config, 10)
    assert norm > config.clip_norm
    assert rel(metrics.loss, loss) < 1e-5 and rel(metrics.gradient_norm, norm) < 1e-4
    bytes_per_token = int(((batch.labels < 256) & batch.mask).sum()) / int(batch.mask.sum())
    assert rel(metrics.bits_per_byte, loss / np.log(2) / bytes_per_token) < 1e-5
    assert float(metrics.learning_rate) == pytest.approx(0.05)
    assert int(new.step) == 1
    for got, want in zip(jax.tree.leaves(new.parameters), jax.tree.leaves(wanted)):
        assert rel(got, want) < 1e-4


@pytest.mark.parametrize("most", [1, 4])
def test_repeated_steps_equal_single_ones(most, getkey):
    """`count` of up to `most` steps in one call are that many calls; batches behind them are not looked at."""
    model = TinyModel(TinyConfig(), key=getkey())
    config = OptimiserConfig(learning_rate=0.1, warmup_steps=1)
    batches = [jax.tree.map(lambda x: x[None], batch_of([40 - i, 30, 20 + i], 16, 6)) for i in range(4)]
    state, static, optimiser = init_state(model, lambda p: make_optimiser(config, 10, p), key=getkey())
    step = make_step(static, optimiser, learning_rate_schedule(config, 10), Precision())
    repeated = jax.jit(repeat_step(step, most))
    for count in {1, max(most - 1, 1), most}:
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *batches[:count], *[batches[0]] * (most - count))
        got, metrics = repeated(state, stacked, count)
        want, losses = state, []
        for batch in batches[:count]:
            want, one = jax.jit(step)(want, batch)
            losses.append(float(one.loss))
        assert int(got.step) == count
        assert metrics.loss.shape == (most,) and rel(metrics.loss[:count], losses) < 1e-6
        for a, b in zip(jax.tree.leaves(got.parameters), jax.tree.leaves(want.parameters)):
            assert rel(a, b) < 1e-5


def test_master_parameters_stay_float32_under_bfloat16_compute(getkey):
    model = TinyModel(TinyConfig(), key=getkey())
    config = OptimiserConfig(learning_rate=1e-5, warmup_steps=0)
    precision = Precision(compute="bfloat16")
    state, static, optimiser = init_state(model, lambda p: make_optimiser(config, 10, p), key=getkey())
    step = make_step(static, optimiser, learning_rate_schedule(config, 10), precision)
    new, metrics = jax.jit(step)(state, jax.tree.map(lambda x: x[None], batch_of([40, 30, 20], 16, 6)))
    assert metrics.loss.dtype == jnp.float32 and abs(float(metrics.loss) - np.log(257)) < 0.1
    for before, after in zip(jax.tree.leaves(state.parameters), jax.tree.leaves(new.parameters)):
        # An update of 1e-5 would be lost in bfloat16 on weights around one.
        assert after.dtype == jnp.float32 and not np.array_equal(before, after)
    sums = make_evaluation(static, precision)(new.parameters, batch_of([40, 30, 20], 16, 6))
    assert sums.nats.dtype == jnp.float32


def test_balance_loss_is_weighted_and_averaged(getkey):
    """Router statistics of each part go through the given loss; the report is their mean."""

    class Routed(TinyModel):
        def hidden(self, tokens, state=None, **kwargs):
            hidden, state, _ = super().hidden(tokens, state, **kwargs)
            return hidden, state, {"square": jnp.square(self.mix.bias).sum()}

    model = Routed(TinyConfig(), key=getkey())
    batch = batch_of([40, 30, 20], 16, 6)
    gradients = {}
    for weight in (0.0, 0.5):
        state, static, _ = init_state(model, lambda p: optax.sgd(1.0), key=getkey())
        step = make_step(
            static,
            optax.sgd(1.0),
            lambda _: 1.0,
            Precision(),
            balance_weight=weight,
            balance_loss=lambda s: s["square"],
        )
        new, metrics = jax.jit(step)(state, jax.tree.map(lambda x: x.reshape(2, 3, -1), batch))
        gradients[weight] = state.parameters.mix.bias - new.parameters.mix.bias
        # Each part has three rows: the sum over rows is three times the square.
        assert rel(metrics.balance, 3 * jnp.square(model.mix.bias).sum()) < 1e-5
    assert rel(gradients[0.5] - gradients[0.0], 0.5 * 3 * 2 * model.mix.bias) < 1e-4


def test_gradients_of_several_batches_are_summed_in_the_accumulation_dtype(getkey):
    """Parameters in bfloat16: the optimiser sees the float32 sum, rounded once."""
    precision = Precision(parameter="bfloat16")
    model = precision.cast_parameters(TinyModel(TinyConfig(), key=getkey()))
    one = batch_of([9, 5, 9], 30, 1)
    parts = 40
    batch = jax.tree.map(lambda x: jnp.broadcast_to(x[None], (parts, *x.shape)), one)
    seen = []

    def update(gradients, state, parameters=None):
        seen.append(gradients)
        return jax.tree.map(jnp.zeros_like, gradients), state

    optimiser = optax.GradientTransformation(lambda parameters: (), update)
    state, static, _ = init_state(model, lambda parameters: optimiser, key=getkey())
    make_step(static, optimiser, lambda step: 1e-3, precision)(state, batch)

    @eqx.filter_grad
    def gradient(parameters):
        sums = next_token_loss(precision.cast_compute(eqx.combine(parameters, static)), one)
        return sums.nats / (parts * sums.tokens.astype(jnp.float32))

    want = jax.tree.map(lambda g: (parts * g.astype(jnp.float32)).astype(g.dtype), gradient(state.parameters))
    for got, true in zip(jax.tree.leaves(seen[0]), jax.tree.leaves(want), strict=True):
        assert got.dtype == jnp.bfloat16
        assert rel(got.astype(jnp.float32), true.astype(jnp.float32)) < 2e-3
