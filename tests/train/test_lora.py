"""Training of low-rank changes alone: what is trained, held, written and read again."""

import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from deltanox.models import QWEN3_5_SIZES, Qwen3_5Config, qwen3_5
from deltanox.nn import LoRALinear, SwiGLU, merge_lora
from deltanox.precision import Precision
from deltanox.train import (
    config_from_dict,
    config_to_dict,
    find_checkpoint,
    init_state,
    make_optimiser,
    read_log,
    train,
)
from deltanox.train._adapt import adapt
from deltanox.train._settings import LoraConfig, OptimiserConfig
from helpers import rel
from tiny_model import TinyConfig, make_tiny

PRECISION = Precision(parameter="bfloat16", compute="bfloat16")


@pytest.fixture
def text(tmp_path):
    rng = np.random.default_rng(0)
    (tmp_path / "text").mkdir()
    for i in range(40):
        (tmp_path / "text" / f"{i}.txt").write_text("".join(rng.choice(["the ", "cat ", "sat "], rng.integers(20, 80))))
    return tmp_path / "text"


def config_of(directory, **train_values):
    return config_from_dict(
        {
            "model": {"width": 16, "bias": False},
            "precision": {"parameter": "bfloat16"},
            "lora": {"rank": 2, "alpha": 4},
            "data": {"row_length": 32, "batch_size": 2, "validation_fraction": 0.2},
            "optimiser": {"learning_rate": 0.1, "warmup_steps": 5},
            "train": {"steps": 24, "checkpoint_every": 8, "directory": str(directory)} | train_values,
        },
        model_type=TinyConfig,
    )


def run(config, text, said=None, **kwargs):
    say = (lambda _: None) if said is None else said.append
    return train(config, text=[text], make_model=make_tiny, say=say, progress=False, **kwargs)


def state_of(config, lora):
    def make(key):
        model = PRECISION.cast_parameters(qwen3_5(config, key=key))
        model = adapt(model, lora, key=key)
        return init_state(model, lambda arrays: make_optimiser(OptimiserConfig(), 100, arrays), key=key)

    return eqx.filter_eval_shape(make, jax.random.key(0))[0]


def size(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("name", ["0.8B", "27B", "35B-A3B"])
def test_memory(name):
    """By shapes: the moments are those of `up` and `down`, in float32; the weights stay in bfloat16."""
    config = QWEN3_5_SIZES[name]
    full, lora = state_of(config, None), state_of(config, LoraConfig(rank=8))
    assert full.frozen is None and size(full.optimiser_state) > 1.99 * size(full.parameters)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(lora.parameters))
    moments = size(lora.optimiser_state)
    assert 2 * size(lora.parameters) <= moments < 2 * size(lora.parameters) + 100
    assert moments < size(full.optimiser_state) / 50
    assert size(lora.frozen) == size(full.parameters)
    adapted = {jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(lora.parameters)}
    assert all(path.endswith((".up", ".down")) for path in adapted)
    assert any(".mixer.in_proj_qkv." in path for path in adapted) and any(".o_proj." in path for path in adapted)
    assert not any(".mlp.gate." in path or "shared_expert_gate" in path for path in adapted)


def test_targets():
    config = Qwen3_5Config(
        vocab_size=257, embed_size=8, num_layers=4, mlp_size=8, num_key_heads=1, num_value_heads=2, num_heads=2,
        num_kv_heads=1,
    )  # fmt: skip
    lora = LoraConfig(rank=3, targets=("in_proj_qkv", "o_proj"))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree_util.tree_leaves_with_path(state_of(config, lora).parameters)]
    assert {path.rsplit(".", 2)[1] for path in paths} == {"in_proj_qkv", "o_proj"} and len(paths) == 2 * (3 + 1)
    with pytest.raises(
        ValueError, match=r"lora.targets must be names of linear layers, but the model has no `qkv`: it"
    ):
        state_of(config, LoraConfig(targets=("qkv",)))


@pytest.mark.parametrize(
    "table, sentence",
    [
        ({"rank": 0}, "lora.rank must be at least 1, but it is 0"),
        ({"alpha": -1}, r"lora.alpha must be 0 \(as the rank\) or above"),
        ({"target": ["o_proj"]}, r"no `lora.target`; did you mean `targets`\?"),
        ({"targets": "o_proj"}, "lora.targets must be a list, but it is 'o_proj'"),
    ],
)
def test_wrong_tables(table, sentence):
    with pytest.raises(ValueError, match=sentence):
        config_from_dict({"model": {}, "lora": table}, model_type=TinyConfig)


def test_through_a_table_and_back(tmp_path):
    config = config_of(tmp_path)
    assert config_to_dict(config)["lora"] == {"rank": 2, "alpha": 4.0, "targets": []}
    assert config_from_dict(config_to_dict(config), model_type=TinyConfig) == config
    assert config_of(tmp_path).lora == LoraConfig(rank=2, alpha=4.0)


def test_a_run(tmp_path, text):
    """Only the changes move and are in a checkpoint; the weights are written once, and a resumption is bit-equal."""
    said = []
    straight = run(config_of(tmp_path / "straight"), text, said)
    assert any("parameters; " in sentence and " of " in sentence.partition(";")[0] for sentence in said)
    losses = [r["loss"] for r in read_log(straight.directory / "log.jsonl") if "loss" in r]
    assert losses[-1] < losses[0] - 0.05

    stored = safetensors.numpy.load_file(find_checkpoint(straight.directory).folder / "arrays.safetensors")
    assert {name for name in stored if name.startswith(".parameters")} == {".parameters.mix.up", ".parameters.mix.down"}
    assert not any("frozen" in name for name in stored)
    frozen = find_checkpoint(straight.directory / "frozen").folder / "arrays.safetensors"
    first = make_tiny(config_of(""), jax.random.split(jax.random.key(0))[1])
    kept = safetensors.numpy.load_file(frozen)
    np.testing.assert_array_equal(kept[".mix.base"], first.mix.weight.astype(jnp.bfloat16))
    np.testing.assert_array_equal(straight.model.embedding, first.embedding.astype(jnp.bfloat16).astype(jnp.float32))
    change = 2 * stored[".parameters.mix.up"] @ stored[".parameters.mix.down"]
    want = kept[".mix.base"].astype(np.float32) + change
    np.testing.assert_allclose(straight.model.mix.weight, want, atol=1e-5)
    assert not any(isinstance(x, LoRALinear) for x in jax.tree.leaves(straight.model, is_leaf=eqx.is_array))

    config = config_of(tmp_path / "resumed")
    run(config, text)
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000024")
    resumed = run(config, text, resume=tmp_path / "resumed")
    assert [r["loss"] for r in read_log(resumed.directory / "log.jsonl") if "loss" in r] == losses
    assert resumed.validation == straight.validation
    arrays = [find_checkpoint(x.directory).folder / "arrays.safetensors" for x in (straight, resumed)]
    assert arrays[0].read_bytes() == arrays[1].read_bytes()


def test_other_weights_under_the_changes_are_refused(tmp_path, text):
    config = config_of(tmp_path / "run", steps=6)
    run(config, text)
    run(config_of(tmp_path / "other", steps=6, seed=1), text)
    shutil.rmtree(tmp_path / "run" / "frozen")
    with pytest.raises(ValueError, match=r"checkpoint: there is no folder `.*frozen`"):
        run(config, text, resume=tmp_path / "run")
    shutil.copytree(tmp_path / "other" / "frozen", tmp_path / "run" / "frozen")
    with pytest.raises(ValueError, match=r"does not hold the weights that `.*` changes; put back the folder `frozen`"):
        run(config, text, resume=tmp_path / "run")


def test_merging_is_what_the_run_computed(getkey):
    """In bfloat16: the merged weight is the sum, rounded once, and computes the same but for that rounding."""
    layer = adapt(PRECISION.cast_parameters(SwiGLU(16, 24, key=getkey())), LoraConfig(rank=2), key=getkey())
    up = jax.random.normal(getkey(), layer.up_proj.up.shape)
    layer = PRECISION.cast_compute(eqx.tree_at(lambda layer: layer.up_proj.up, layer, up))
    assert layer.up_proj.up.dtype == jnp.float32 and layer.up_proj.base.dtype == jnp.bfloat16
    merged = PRECISION.cast_compute(merge_lora(layer))
    assert merged.up_proj.weight.dtype == jnp.bfloat16
    np.testing.assert_array_equal(merged.up_proj.weight, layer.up_proj.weight)
    assert not np.array_equal(merged.up_proj.weight, layer.up_proj.base)
    x = jax.random.normal(getkey(), (5, 16)).astype(jnp.bfloat16)
    assert rel(merged(x), layer(x)) < 1e-2
