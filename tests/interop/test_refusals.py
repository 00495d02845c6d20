"""What `load` and `save` refuse, and the sentence that each refusal is."""

import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from checkpoints import FIXTURES
from deltanox.interop import config_from_hf, config_to_hf, load, save
from deltanox.models import QWEN3_5_SIZES, QWEN3_NEXT_80B_A3B

LAYER = "model.language_model.layers.0.linear_attn."
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path):
    """A copy of a checkpoint that may be damaged."""

    def copy(name):
        return Path(shutil.copytree(FIXTURES / name, tmp_path / name))

    return copy


def change_tensors(path, change):
    save_file(change(load_file(path)), path)


def change_json(path, change):
    table = json.loads(path.read_text())
    change(table)
    path.write_text(json.dumps(table))


def without(name):
    return lambda table: {key: x for key, x in table.items() if key != name}


def renamed(old, new):
    return lambda table: {new if key == old else key: x for key, x in table.items()}


@pytest.mark.parametrize(
    "change, sentence",
    [
        (without(f"{LAYER}A_log"), rf"lacks the tensor `{LAYER}A_log`; fetch it again, or correct config.json"),
        (renamed(f"{LAYER}dt_bias", f"{LAYER}dt"),
         rf"lacks the tensor `{LAYER}dt_bias`, and has `{LAYER}dt` that this model has no place for"),
        (lambda t: t | {f"{LAYER}in_proj_qkv.bias": np.ones(3, "f4")},
         rf"has the tensor `{LAYER}in_proj_qkv.bias` that this model has no place for: is config.json of another model"),
        (lambda t: t | {f"{LAYER}conv1d.weight": np.swapaxes(t[f"{LAYER}conv1d.weight"], 1, 2).copy()},
         rf"the tensor `{LAYER}conv1d.weight` must be \[52, 1, 4\] by config.json, but it is \[52, 4, 1\]"),
        (lambda t: t | {f"{LAYER}A_log": np.ones(2, "i4")},
         rf"`{LAYER}A_log` must hold BF16, F16, F32, F64, but it holds I32: quantised weights are not read"),
        (lambda t: {k: x for k, x in t.items() if not k.endswith("embed_tokens.weight")},
         "must have one tensor `embed_tokens.weight` under one of the prefixes 'model.', .* but there is none; its first"),
        (lambda t: t | {"model.embed_tokens.weight": np.ones((37, 16), "f4")}, "under one of .* but there are 2;"),
        (without("mtp.layers.0.mlp.up_proj.weight"), "lacks the tensor `mtp.layers.0.mlp.up_proj.weight`; fetch"),
        (lambda t: t | {"mtp.layers.1.mlp.up_proj.weight": np.ones(3, "f4")}, "has the tensor `mtp.layers.1.mlp.up_proj"),
    ],
)  # fmt: skip
def test_tensors(folder, change, sentence):
    path = folder("qwen3_5")
    change_tensors(path / "model.safetensors", change)
    with pytest.raises(ValueError, match=sentence):
        load(path)


def test_every_tensor_is_needed(folder):
    """Leave out each tensor once: it is named, whichever it is; what is passed over is the vision tower."""
    path = folder("qwen3_next")
    tensors = load_file(path / "model.safetensors")
    for name in [*list(tensors)[::25], "model.layers.2.linear_attn.in_proj_qkvz.weight", "lm_head.weight"]:
        save_file({key: x for key, x in tensors.items() if key != name}, path / "model.safetensors")
        with pytest.raises(ValueError, match=f"lacks the tensor `{name}`"):
            load(path)


@pytest.mark.parametrize("cut", [1, 1000, -60_000])
def test_a_file_cut_short(folder, cut):
    file = folder("qwen3_5") / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-cut] if cut > 0 else data[:4])
    with pytest.raises(ValueError, match=r"`.*model.safetensors` is cut short or damaged \(.*\); fetch it again"):
        load(file.parent)


def test_shards(folder):
    path = folder("qwen3_5_moe")
    index, name = path / "model.safetensors.index.json", "model.layers.3.mlp.gate.weight"
    original = index.read_text()
    (path / SHARD).rename(path / "elsewhere")
    with pytest.raises(
        ValueError, match=f"the shard `.*{SHARD}` is missing, which `{index.name}` lists; fetch it again"
    ):
        load(path)
    (path / "elsewhere").rename(path / SHARD)
    change_json(index, lambda t: t["weight_map"].pop(name))
    with pytest.raises(ValueError, match=f"the tensor `{name}` is in `{SHARD}`, but `.*` does not list it; fetch both"):
        load(path)
    index.write_text(original)
    change_json(index, lambda t: t["weight_map"].update({name: SHARD.replace("2-", "1-")}))
    with pytest.raises(
        ValueError, match=f"is in `{SHARD}`, but `.*` looks for it in `model-00001-of-00002.safetensors`"
    ):
        load(path)
    index.write_text(original)
    change_json(index, lambda t: t["weight_map"].update(more=SHARD))
    with pytest.raises(ValueError, match=f"lists the tensor `more` in `{SHARD}`, which doesn't have it; fetch both"):
        load(path)
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"^load: `.*index.json`: there is no `weight_map`: fetch it again"):
        load(path)


def test_folders(folder, tmp_path):
    with pytest.raises(ValueError, match="there is no folder `nowhere`; give the folder of a Hugging Face checkpoint"):
        load("nowhere")
    with pytest.raises(
        ValueError, match=r"has neither `model.safetensors` nor `.*`; other formats are not read, so save"
    ):
        load(tmp_path)
    path = folder("qwen3_next")
    (path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"^`.*config.json` is no JSON \(.*\): fetch it again"):
        load(path)
    (path / "config.json").unlink()
    with pytest.raises(
        ValueError, match=r"config.json: there is no file `.*config.json`; give the folder of a Hugging"
    ):
        load(path)


def test_arguments():
    with pytest.raises(ValueError, match=r"has no `mtp.\*` tensors, but `mtp` is True: leave it at None"):
        load(FIXTURES / "qwen3_5_moe", mtp=True)
    with pytest.raises(
        ValueError, match="load: `dtype` must be one of bfloat16, float16, float32, float64, but it is int32"
    ):
        load(FIXTURES / "qwen3_5_moe", dtype="int32")


RAW = config_to_hf(QWEN3_5_SIZES["0.8B"], dtype="bfloat16")
SPARSE = config_to_hf(QWEN3_5_SIZES["35B-A3B"], dtype="bfloat16")
NEXT = config_to_hf(QWEN3_NEXT_80B_A3B, dtype="bfloat16")
NEEDED = [
    "model_type", "vocab_size", "hidden_size", "num_hidden_layers", "rms_norm_eps", "linear_num_key_heads",
    "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim",
    "num_attention_heads", "num_key_value_heads", "head_dim", "tie_word_embeddings",
]  # fmt: skip


@pytest.mark.parametrize(
    "raw, name",
    [
        *[(RAW, name) for name in [*NEEDED, "intermediate_size"]],
        *[(SPARSE, name) for name in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")],
        *[(NEXT, name) for name in ("shared_expert_intermediate_size", "norm_topk_prob")],
    ],
)
def test_a_field_that_is_missing(raw, name):
    with pytest.raises(
        ValueError, match=f"^config.json: there is no `{name}`: add it, or take the config.json that was"
    ):
        config_from_hf({key: x for key, x in raw.items() if key != name})


@pytest.mark.parametrize("name", ["rope_theta", "partial_rotary_factor"])
def test_a_rotary_field_that_is_missing(name):
    rope = {key: x for key, x in RAW["rope_parameters"].items() if key != name}
    with pytest.raises(ValueError, match=f"^config.json: there is no `{name}`"):
        config_from_hf(RAW | {"rope_parameters": rope})


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"model_type": "qwen3"}, "`model_type` must be one of 'qwen3_5', .* 'qwen3_next', but it is 'qwen3'"),
        ({"model_type": "qwen3_5"}, "there is no `text_config`"),
        ({"hidden_act": "gelu"}, "`hidden_act` must be 'silu', the only way that these models compute, but it is gelu"),
        ({"attention_bias": True}, "`attention_bias` must be False"),
        ({"attn_output_gate": False}, "`attn_output_gate` must be True"),
        ({"mlp_only_layers": [3]}, r"`mlp_only_layers` must be \[\], .* but it is \[3\]"),
        ({"decoder_sparse_step": 2}, "`decoder_sparse_step` must be 1, the only way that these models compute, but it is 2"),
        ({"quantization_config": {"bits": 8}}, "`quantization_config` must be None"),
        ({"layer_types": ["full_attention"] * 23 + ["linear_attention"]}, "`layer_types` must name .* = 24 layers in equal"),
        ({"layer_types": ["linear_attention"] * 24}, "`layer_types` must name num_hidden_layers = 24 layers in equal periods"),
        ({"layer_types": None, "full_attention_interval": 5}, "`num_layers` must be a multiple of `full_attention_interval`"),
        ({"rope_parameters": RAW["rope_parameters"] | {"rope_type": "yarn"}}, "but `rope_type` is 'yarn': scaled positions"),
        ({"rope_parameters": RAW["rope_parameters"] | {"mrope_interleaved": False}}, "`mrope_interleaved` must be true"),
        ({"output_gate_type": "relu"}, "`output_gate` must be one of 'silu', 'sigmoid', but it is 'relu'"),
        ({"hidden_size": "1024"}, "^config.json: `hidden_size` must be an integer, but it is '1024': correct it, or take"),
    ],
)  # fmt: skip
def test_configs(unchecked, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        config_from_hf(RAW | change)


def test_saving(tmp_path):
    model, config = load(FIXTURES / "qwen3_next")
    with pytest.raises(ValueError, match="must be a new or an empty folder: give another one, or delete what is in it"):
        save(model, config, FIXTURES)
    wider = eqx.tree_at(lambda m: m.norm.weight, model, jnp.ones(3))
    with pytest.raises(
        ValueError, match=r"`model` must be the model of `config`, but its `.norm.weight` is float32\[3\] "
    ):
        save(wider, config, tmp_path / "a")
    headless = eqx.tree_at(lambda m: m.mtp, model, None)
    with pytest.raises(
        ValueError, match=r"but its `.mtp.*` is missing where the config has \[.*\]: give the config that it"
    ):
        save(headless, config, tmp_path / "a")
    with pytest.raises(ValueError, match=r"load: `.*qwen3_5` lacks the tensor `lm_head.weight`|has the tensor"):
        save(model, config, tmp_path / "a", like=FIXTURES / "qwen3_5")
    assert not (tmp_path / "a").exists()
    assert all(isinstance(x, jax.Array) for x in jax.tree.leaves(model))
