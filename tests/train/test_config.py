"""TOML to frozen dataclasses, and what is said about a wrong one."""

import dataclasses
import json
from pathlib import Path

import equinox as eqx
import jax
import pytest

from deltanox import remat
from deltanox.ops import Residuals
from deltanox.train import config_from_dict, config_to_dict, read_config
from deltanox.train._config import differences
from deltanox.train._loop import default_model
from tiny_model import TinyConfig

TEXT = """
implementation = "xla"
[model]
width = 16
rates = [0.1, 1]
[precision]
compute = "bfloat16"
[data]
row_length = 32
[optimiser]
learning_rate = 1e-2
[train]
steps = 60
"""


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "tiny.toml"
    path.write_text(TEXT)
    return path


def test_values_defaults_and_overrides(path):
    config = read_config(
        path,
        [
            "model.width=4",
            "data.seed = 3",
            "train.directory=some/where",
            "optimiser.weight_decay=0",
            "implementation=chunked",
        ],
        model_type=TinyConfig,
    )
    assert config.model == TinyConfig(width=4, rates=(0.1, 1.0)) and isinstance(config.model.rates[1], float)
    assert config.precision.compute.name == "bfloat16" and config.precision.parameter.name == "float32"
    assert config.data.row_length == 32 and config.data.seed == 3 and config.implementation == "chunked"
    assert config.train.directory == "some/where" and config.train.steps == 60
    assert config.optimiser.weight_decay == 0.0 and isinstance(config.optimiser.weight_decay, float)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.data.seed = 1


@pytest.mark.parametrize(
    "name", ["qwen3_5_nano", "qwen3_5_tiny", "qwen3_5_moe_tiny", "qwen3_next_tiny", "qwen3_next_80b_a3b"]
)
def test_the_configs_of_the_repository(name):
    config = read_config(Path(__file__).parents[2] / "configs" / f"{name}.toml")
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert config.precision.parameter.name == "float32"


def test_through_json_and_back(path):
    config = read_config(path, model_type=TinyConfig)
    table = json.loads(json.dumps(config_to_dict(config)))
    assert config_from_dict(table, model_type=TinyConfig) == config


def test_the_table_remat_is_a_policy(path):
    assert read_config(path, model_type=TinyConfig).remat is None
    config = read_config(path, ["remat.policy=kernels", "remat.mlp=offload"], model_type=TinyConfig)
    assert config.remat == remat.policy("kernels", mlp="offload")
    table = json.loads(json.dumps(config_to_dict(config)))
    assert table["remat"] == {"policy": "kernels", "mlp": "offload"}
    assert config_from_dict(table, model_type=TinyConfig) == config
    assert config_from_dict(table | {"remat": {}}, model_type=TinyConfig).remat == remat.nothing
    assert differences(config_to_dict(read_config(path, model_type=TinyConfig)), table) == [
        "remat.mlp was 'missing' and is 'offload'",
        "remat.policy was 'missing' and is 'kernels'",
    ]


def test_the_table_residuals_reaches_the_layers():
    nano = Path(__file__).parents[2] / "configs" / "qwen3_5_nano.toml"
    config = read_config(nano, ["residuals.states_every=8", "residuals.qkv=recompute", "model.num_layers=4"])
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    model = eqx.filter_eval_shape(default_model, config, jax.random.key(0))
    mixer = model.layers.layers.blocks[0].mixer
    assert mixer.residuals == Residuals(states_every=8, qkv="recompute")
    # a run of a version without the table was one with its defaults
    old = {name: value for name, value in config_to_dict(config).items() if name != "residuals"}
    assert differences(old, config_to_dict(config)) == [
        "residuals.qkv was 'save' and is 'recompute'",
        "residuals.states_every was 2 and is 8",
    ]


@pytest.mark.parametrize(
    "override, sentence",
    [
        ("residuals.qkv=keep", "residuals.qkv must be one of 'save', 'recompute', but it is 'keep'"),
        ("residuals.states_every=0", "Residuals: `states_every` must be an integer of at least 1"),
        ("remat.gdm=device", r"remat: there is no residual and no group `gdm`; did you mean `gdn`\?"),
        ("remat.gdn=host", "remat: `gdn` must be 'remat' .*, but it is 'host'"),
        ("remat.gdn=[1]", r"remat: `gdn` must be 'remat' .*, but it is \[1\]"),
        ("remat.policy=kernel", "remat: the ready policies are 'nothing', .*, but it is 'kernel'"),
        ("remat=kernels", r"`remat` is a section, write it as \[remat\]"),
        ("model.widht=4", r"no `model.widht`; did you mean `width`\?"),
        ("trian.steps=4", r"no `trian`; did you mean `train`\?"),
        ("train.learning_rate=1", r"no `train.learning_rate`; did you mean `optimiser.learning_rate`\?"),
        ("implementation=chunky", r"implementation must be one of .*, but it is 'chunky'; did you mean 'chunked'\?"),
        ("data.row_length=12.5", "data.row_length must be an integer, but it is 12.5"),
        ("data.row_length=true", "data.row_length must be an integer, but it is True"),
        ("data.row_length=1", "data.row_length must be at least 2 tokens, but it is 1"),
        ("data.validation_fraction=1", "data.validation_fraction must be between 0 and 1"),
        ("optimiser.learning_rate=-1", "optimiser.learning_rate must be above 0, but it is -1.0"),
        ("optimiser.learning_rate=nan", "optimiser.learning_rate must be above 0, but it is nan"),
        ("optimiser.learning_rate=fast", "optimiser.learning_rate must be a number, but it is 'fast'"),
        ("optimiser.beta2=1", r"optimiser.beta2 must be in \[0, 1\)"),
        ("optimiser.warmup_steps=60", "optimiser.warmup_steps must be below train.steps, but they are 60 and 60"),
        ("train.steps=0", "train.steps must be at least 1"),
        ("train.sample_prompt=3", "train.sample_prompt must be a string, but it is 3"),
        ("model.rates=[1]", "model.rates must be a list of 2 values"),
        ("model.vocab_size=256", "model.vocab_size must be at least 257"),
        ("precision.compute=float8", "compute.* must be one of .*'float8'"),
        ("data=3", r"`data` is a section, write it as \[data\]"),
        ("implementation.x=3", "`implementation` has no keys of its own"),
        ("family=qwen3_nxt", r"family must be one of .*, but it is 'qwen3_nxt'; did you mean 'qwen3_next'\?"),
        ("steps", "write section.key=value, such as train.steps=100, but it is `steps`"),
    ],
)
def test_wrong_values(path, override, sentence):
    with pytest.raises(ValueError, match=sentence):
        read_config(path, [override], model_type=TinyConfig)


def test_wrong_files(tmp_path):
    with pytest.raises(ValueError, match="there is no file"):
        read_config(tmp_path / "none.toml", model_type=TinyConfig)
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(ValueError, match="bad.toml` is no TOML"):
        read_config(tmp_path / "bad.toml", model_type=TinyConfig)
    (tmp_path / "none.toml").write_text("")
    with pytest.raises(ValueError, match=r"no section \[model\]"):
        read_config(tmp_path / "none.toml", model_type=TinyConfig)


def test_differences_that_matter(path):
    old = config_to_dict(read_config(path, model_type=TinyConfig))
    same = config_to_dict(read_config(path, ["train.checkpoint_every=7", "train.directory=x"], model_type=TinyConfig))
    new = config_to_dict(read_config(path, ["train.steps=70", "model.width=3"], model_type=TinyConfig))
    assert differences(old, same) == []
    earlier = {**old, "data": {name: x for name, x in old["data"].items() if name != "tokenizer"}}
    assert differences(earlier, same) == []
    assert differences(old, new) == ["model.width was 16 and is 3", "train.steps was 60 and is 70"]
