"""The sizes of Qwen3.5: counts of the released models, and configs that are refused."""

import dataclasses
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

from deltanox.models import (
    QWEN3_5_SIZES,
    Qwen3_5Config,
    Qwen3NextConfig,
    qwen3_5,
    qwen3_next,
)
from deltanox.train._config import read_config
from releases import RELEASES, TENSORS

COUNTS = {
    "0.8B": 752_393_024,
    "2B": 1_881_825_088,
    "4B": 4_205_751_296,
    "9B": 8_953_803_264,
    "27B": 26_895_998_464,
    "35B-A3B": 34_660_610_688,
    "122B-A10B": 122_111_526_912,
    "397B-A17B": 396_346_350_336,
    "80B-A3B": 79_674_391_296,
}
MTP_COUNTS = {
    "0.8B": 20_452_864,
    "2B": 60_828_160,
    "4B": 120_599_552,
    "9B": 243_290_624,
    "27B": 424_699_392,
    "35B-A3B": 844_640_768,
    "122B-A10B": 2_523_679_232,
    "397B-A17B": 6_595_568_128,
    "80B-A3B": 1_650_471_424,
}

SMALL = dict(
    vocab_size=300, embed_size=32, num_layers=4, num_key_heads=2, num_value_heads=4, num_heads=4, num_kv_heads=2,
    mlp_size=48,
    key_head_size=8, value_head_size=8, head_size=16,
)  # fmt: skip
SPARSE = {k: v for k, v in SMALL.items() if k != "mlp_size"} | dict(
    num_experts=4, top_k=2, expert_size=8, shared_size=8
)


def shapes(config):
    return eqx.filter_eval_shape(qwen3_5, config, key=jax.random.key(0))


def count(model) -> int:
    return sum(x.size for x in jax.tree.leaves(eqx.filter(model, lambda x: hasattr(x, "shape"))))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_of_the_releases(name):
    config = RELEASES[name]
    model = shapes(config)
    assert count(model) == COUNTS[name]
    assert count(shapes(dataclasses.replace(config, mtp_head=True))) == COUNTS[name] + MTP_COUNTS[name]
    if name == "80B-A3B":
        return  # its experts are tensors each by themselves: tests/interop counts them
    # a stacked array is one tensor a period in the checkpoint
    periods = config.num_periods
    stacked = len(jax.tree.leaves(eqx.filter(model.layers, lambda x: hasattr(x, "shape"))))
    assert stacked * periods + 2 + (model.head is not None) == TENSORS[name]


def test_all_sizes_are_counted():
    assert COUNTS.keys() == MTP_COUNTS.keys() == RELEASES.keys()
    assert QWEN3_5_SIZES.keys() == TENSORS.keys()


@pytest.mark.parametrize("name, parameters", [("nano", 6_911_152), ("tiny", 132_065_424)])
def test_counts_of_the_config_files(name, parameters):
    path = Path(__file__).parents[2] / "configs" / f"qwen3_5_{name}.toml"
    assert count(shapes(read_config(path).model)) == parameters
    assert f"{parameters:,}" in path.read_text("utf-8")


@pytest.mark.parametrize("name", RELEASES)
def test_the_config_files_of_the_releases(name):
    family = "qwen3_next" if name == "80B-A3B" else "qwen3_5"
    path = Path(__file__).parents[2] / "configs" / f"{family}_{name.lower().replace('-', '_')}.toml"
    config = read_config(path)
    assert config.model == RELEASES[name] and type(config.model) is type(RELEASES[name]) and config.family == family
    assert f"{COUNTS[name]:,}" in path.read_text("utf-8")


def test_qwen3_next():
    """The same blocks as Qwen3.5's with experts; the weights of the chosen may be left as they are."""
    sizes = SMALL | SPARSE
    del sizes["mlp_size"]
    config = Qwen3NextConfig(**sizes, norm_topk_prob=False)
    model = eqx.filter_eval_shape(lambda key: qwen3_next(config, key=key), jax.random.key(0))
    assert model.layers.layers.blocks[0].mlp.norm_topk_prob is False
    assert count(model) == count(shapes(Qwen3_5Config(**sizes)))
    assert Qwen3NextConfig(**sizes).norm_topk_prob is True and Qwen3_5Config(**sizes).norm_topk_prob is True
    with pytest.raises(
        ValueError, match="Qwen3NextConfig: `num_experts` must be at least 1, but it is 0: a dense model"
    ):
        Qwen3NextConfig(**SMALL)


def test_dtypes_of_the_weights():
    model = eqx.filter_eval_shape(qwen3_5, Qwen3_5Config(**SMALL), dtype=jnp.bfloat16, key=jax.random.key(0))
    kept = {
        jax.tree_util.keystr(path).rpartition(".blocks")[2]
        for path, x in jax.tree_util.tree_leaves_with_path(model)
        if getattr(x, "dtype", None) == jnp.float32
    }
    assert kept == {f"[{i}].mixer.{name}" for i in range(3) for name in ("A_log", "dt_bias", "norm.weight")}


def test_the_last_block_of_a_period_is_attention():
    config = Qwen3_5Config(**SMALL | dict(num_layers=6, full_attention_interval=3))
    period = shapes(config).layers.layers
    assert [type(block.mixer).__name__ for block in period.blocks] == [
        "GatedDeltaNet",
        "GatedDeltaNet",
        "GatedAttention",
    ]
    assert config.num_periods == 2


@pytest.mark.parametrize(
    "change, sentence",
    [
        *[({field: 0}, f"`{field}` must be an integer of at least 1, but it is 0") for field in SMALL],
        *[({field: 2.5}, f"`{field}` must be an integer of at least 1, but it is 2.5") for field in SMALL],
        *[({field: True}, f"`{field}` must be an integer of at least 1, but it is True") for field in SMALL],
        ({"conv_size": 0}, "`conv_size` must be an integer of at least 1"),
        ({"full_attention_interval": 0}, "`full_attention_interval` must be an integer of at least 1"),
        ({"full_attention_interval": 3}, "`num_layers` must be a multiple of `full_attention_interval`.* 4 and 3"),
        ({"num_value_heads": 3}, "`num_value_heads` must be a multiple of `num_key_heads`, but they are 3 and 2"),
        ({"num_heads": 3}, "`num_heads` must be a multiple of `num_kv_heads`, but they are 3 and 2"),
        ({"rotary_fraction": 0.3}, "`head_size` times `rotary_fraction` must be an even number"),
        ({"rotary_fraction": 1.5}, "`head_size` times `rotary_fraction` must be an even number"),
        ({"rotary_fraction": 0}, "`rotary_fraction` must be a positive number"),
        ({"rotary_fraction": "much"}, "`rotary_fraction` must be a positive number"),
        ({"rope_theta": -1.0}, "`rope_theta` must be a positive number"),
        ({"eps": float("nan")}, "`eps` must be a positive number"),
        ({"tied_head": 1}, "`tied_head` must be true or false, but it is 1"),
        ({"output_gate": "relu"}, "`output_gate` must be one of 'silu', 'sigmoid', but it is 'relu'"),
        ({"mrope_sections": (11, 11, 10)}, "`mrope_sections` must be three integers that add up to .* 2"),
        ({"mrope_sections": (1, 1)}, "`mrope_sections` must be three integers"),
        ({"top_k": 2}, "`top_k` must be 0 in a model without experts"),
        ({"num_experts": 4, "top_k": 2, "expert_size": 8, "shared_size": 8},
        "`mlp_size` must be 0 in a model with experts"),
        ({"num_experts": -1}, "`num_experts` must be an integer of at least 1, but it is -1"),
    ],
)  # fmt: skip
def test_refuses(unchecked, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Qwen3_5Config(**SMALL | change)


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"top_k": 5}, "`top_k` must be at most `num_experts`, but they are 5 and 4"),
        ({"top_k": 0}, "`top_k` must be an integer of at least 1, but it is 0"),
        ({"expert_size": 0}, "`expert_size` must be an integer of at least 1"),
    ],
)
def test_refuses_experts(unchecked, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        Qwen3_5Config(**SPARSE | change)


def test_is_a_record():
    config = Qwen3_5Config(**SMALL)
    assert hash(config) == hash(dataclasses.replace(config))
    assert config == dataclasses.replace(config)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.embed_size = 3
