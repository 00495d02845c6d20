"""Checkpoints written again: byte by byte like the one that was read, or in the layout of the releases."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from checkpoints import FAMILIES, FIXTURES, same, tensors_of
from deltanox.cli import main
from deltanox.interop import config_from_hf, config_to_hf, load, save
from deltanox.interop._load import make_skeleton
from deltanox.interop._names import Layout, Names, places
from deltanox.models import QWEN3_5_SIZES, Qwen3NextConfig
from deltanox.nn import GatedDeltaNet
from releases import RELEASES, TENSORS

SMALL = dict(
    vocab_size=20, embed_size=8, num_layers=4, full_attention_interval=2, num_key_heads=2, num_value_heads=4, num_heads=2,
    num_kv_heads=1, key_head_size=4, value_head_size=6, head_size=8,
)  # fmt: skip

EXPERTS = dict(num_experts=3, top_k=2, expert_size=4, shared_size=5)


@pytest.mark.parametrize("name, shard_bytes", [*[(name, 2**31) for name in FAMILIES], ("qwen3_next", 20_000)])
def test_like_the_one_that_was_read(tmp_path, name, shard_bytes):
    """Every tensor byte by byte, those of vision and `mtp.*` too (row 67), whether they were loaded or not."""
    (source := tmp_path / "source").mkdir()
    for path in (FIXTURES / name).iterdir():
        shutil.copy(path, source / path.name)
    (source / "tokenizer.json").write_text("{}")
    want = tensors_of(source)
    for mtp in (None, False):
        folder = tmp_path / f"out_{mtp}"
        model, config = load(source, mtp=mtp)
        save(model, config, folder, like=source, shard_bytes=shard_bytes)
        got = tensors_of(folder)
        assert got.keys() == want.keys()
        for key, x in want.items():
            assert got[key].dtype == x.dtype and got[key].tobytes() == x.tobytes(), key
        assert (folder / "tokenizer.json").is_file()
        assert json.loads((folder / "config.json").read_text()) == json.loads((source / "config.json").read_text())
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        assert (len(files) == 1) == (shard_bytes == 2**31) and load(folder)[1] == load(source)[1]
        with safe_open(folder / files[0], "numpy") as opened:
            assert opened.metadata() == {"format": "pt"}


@pytest.mark.parametrize("name", FAMILIES)
def test_alone(tmp_path, name):
    """In the releases' layout, and loaded again the same."""
    model, config = load(FIXTURES / name)
    save(model, config, tmp_path / "out")
    again, config_again = load(tmp_path / "out")
    assert config_again == config
    same(again, model)
    names = tensors_of(tmp_path / "out").keys()
    assert all(name.startswith(("model.", "lm_head.", "mtp.")) for name in names)
    assert ("lm_head.weight" in names) == (not config.tied_head)
    assert ("mtp.fc.weight" in names) == config.mtp_head
    assert any(".experts.0." in name for name in names) == (name == "qwen3_next")
    assert any(name.endswith("in_proj_qkvz.weight") for name in names) == (name == "qwen3_next")


@pytest.mark.parametrize("like", [None, FIXTURES / "qwen3_5"])
def test_another_dtype(tmp_path, like):
    model, config = load(FIXTURES / "qwen3_5", dtype="float32")
    save(model, config, tmp_path / "out", like=like, dtype="bfloat16")
    stored = tensors_of(tmp_path / "out")
    wide = {name.rpartition("layers.")[2].partition(".")[2] for name, x in stored.items() if x.dtype == np.float32}
    assert wide == {"linear_attn.A_log", "linear_attn.norm.weight"} | (set() if like else {"linear_attn.dt_bias"})
    raw = json.loads((tmp_path / "out" / "config.json").read_text())
    assert raw["dtype"] == "bfloat16"
    same(load(tmp_path / "out")[0], load(FIXTURES / "qwen3_5")[0])


@pytest.mark.parametrize("mtp_head", [False, True])
@pytest.mark.parametrize("kind", ["dense", "sparse", "next"])
def test_every_element_has_its_place(tmp_path, kind, mtp_head):
    """Elements all different: none is left out, written twice or lost, in the model and in the file."""
    config = {
        "dense": qwen3_5_config(mlp_size=12, tied_head=True, mtp_head=mtp_head),
        "sparse": qwen3_5_config(**EXPERTS, mtp_head=mtp_head),
        "next": Qwen3NextConfig(**SMALL, **EXPERTS, mtp_head=mtp_head),
    }[kind]
    skeleton = make_skeleton(config, jnp.float32)
    leaves, tree = jax.tree.flatten(skeleton)
    starts = np.cumsum([0] + [x.size for x in leaves])
    counted = [np.arange(a, a + x.size, dtype="f4").reshape(x.shape) for a, x in zip(starts, leaves)]
    model = jax.tree.unflatten(tree, [jnp.asarray(x) for x in counted])
    save(model, config, tmp_path / "out")
    stored = tensors_of(tmp_path / "out")
    values = np.sort(np.concatenate([x.ravel() for x in stored.values()]))
    np.testing.assert_array_equal(values, np.arange(starts[-1], dtype="f4"))
    same(load(tmp_path / "out")[0], model)


def qwen3_5_config(**sizes):
    return type(QWEN3_5_SIZES["2B"])(**SMALL, **sizes)


def test_fused_projections():
    """Row 56: rows lie by key head, [q | k | v | z] and [b | a]. So a contiguous share of them is a smaller layer, and the
    sum of the shares' outputs is the whole layer's."""
    sizes = SMALL | dict(num_key_heads=4, num_value_heads=8)
    config = Qwen3NextConfig(**sizes, **EXPERTS)
    layer = mixer(config)
    x = jax.random.normal(jax.random.key(1), (7, 8))
    run = eqx.filter_jit(lambda layer, x: layer(x)[0])
    whole = run(layer, x)
    D, h, K, H, V = 8, 4, 4, 8, 6
    rows = fuse(config, layer)
    for shares in (2, 4):
        small = dataclasses.replace(config, num_key_heads=h // shares, num_value_heads=H // shares)
        total, blank = 0, mixer(small)
        for i in range(shares):

            def share(x, i=i, shares=shares):
                return jnp.split(x, shares)[i]

            channels = [share(x) for x in jnp.split(layer.conv.weight, [h * K, 2 * h * K])]
            own = cut(small, blank, {name: np.split(x, shares)[i] for name, x in rows.items()})
            own = eqx.tree_at(
                lambda m: (m.conv.weight, m.A_log, m.dt_bias, m.norm.weight, m.out_proj.weight),
                own,
                (jnp.concatenate(channels), share(layer.A_log), share(layer.dt_bias), layer.norm.weight,
                 jnp.split(layer.out_proj.weight, shares, axis=1)[i]),
            )  # fmt: skip
            total = total + run(own, x)
        assert np.abs(np.asarray(total - whole)).max() < 1e-6 * max(1.0, float(jnp.abs(whole).max()))
    assert rows["in_proj_qkvz"].shape == (h * (2 * K + 2 * (H // h) * V), D)


def mixer(config):
    return GatedDeltaNet(
        config.embed_size, num_key_heads=config.num_key_heads, num_value_heads=config.num_value_heads,
        key_head_size=config.key_head_size, value_head_size=config.value_head_size, key=jax.random.key(0),
    )  # fmt: skip


PROJECTIONS = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")


@functools.cache
def parts_of(config):
    """Each projection's parts in the fused layout, of the first layer."""
    found = places(config, make_skeleton(config, jnp.float32), Layout(fused=True, separate=False, separate_mtp=False))
    by_path = {place.path: place.periods[0] for place in found}
    return {name: by_path[f".layers.layers.blocks[0].mixer.{name}.weight"] for name in PROJECTIONS}


def fuse(config, layer):
    rows = {}
    for name, parts in parts_of(config).items():
        for part in parts:
            tensor = rows.setdefault(part.tensor.split(".")[-2], np.full(part.shape, np.nan, "f4"))
            part.of_tensor(tensor)[...] = part.of_array(np.array(getattr(layer, name).weight))
    assert not any(np.isnan(x).any() for x in rows.values())
    return rows


def cut(config, layer, rows):
    for name, parts in parts_of(config).items():
        weight = np.full(getattr(layer, name).weight.shape, np.nan, "f4")
        for part in parts:
            part.of_array(weight)[...] = part.of_tensor(rows[part.tensor.split(".")[-2]])
        layer = eqx.tree_at(lambda m, name=name: getattr(m, name).weight, layer, jnp.asarray(weight))
    return layer


@pytest.mark.parametrize("name", ["0.8B", "35B-A3B", "80B-A3B"])
def test_names_and_shapes_of_the_releases(name):
    config = RELEASES[name]
    found = places(config, make_skeleton(config, jnp.bfloat16), Layout.of_config(config))
    names = Names(trunk="model.language_model.")
    shapes = {names(part.tensor): part.shape for place in found for parts in place.periods for part in parts}
    layer = "model.language_model.layers.0.linear_attn."
    if name == "80B-A3B":
        assert len(shapes) == 74_391
        want = {
            "in_proj_qkvz": (12288, 2048),
            "in_proj_ba": (64, 2048),
            "conv1d": (8192, 1, 4),
            "out_proj": (2048, 4096),
        }
        moe = "model.language_model.layers.47.mlp.experts.511."
        assert shapes[f"{moe}gate_proj.weight"] == (512, 2048) and shapes[f"{moe}down_proj.weight"] == (2048, 512)
    elif name == "0.8B":
        assert len(shapes) == TENSORS[name]
        want = {
            "in_proj_qkv": (6144, 1024), "in_proj_z": (2048, 1024), "in_proj_b": (16, 1024), "in_proj_a": (16, 1024),
            "conv1d": (6144, 1, 4), "out_proj": (1024, 2048), "norm": (128,),
        }  # fmt: skip
        attention = "model.language_model.layers.3.self_attn."
        assert shapes[f"{attention}q_proj.weight"] == (4096, 1024) and shapes[f"{attention}k_norm.weight"] == (256,)
        assert "lm_head.weight" not in shapes and shapes[f"{layer}A_log"] == (16,)
    else:
        assert len(shapes) == TENSORS[name]
        want = {"in_proj_qkv": (8192, 2048), "in_proj_z": (4096, 2048), "out_proj": (2048, 4096)}
        moe = "model.language_model.layers.39.mlp."
        assert shapes[f"{moe}experts.gate_up_proj"] == (256, 1024, 2048)
        assert shapes[f"{moe}experts.down_proj"] == (256, 2048, 512)
        assert shapes[f"{moe}shared_expert_gate.weight"] == (1, 2048)
    assert {part: shapes[f"{layer}{part}.weight"] for part in want} == want


def test_fifteen_tensors_of_one_token_further():
    config = dataclasses.replace(QWEN3_5_SIZES["0.8B"], mtp_head=True)
    found = places(config, make_skeleton(config, jnp.bfloat16), Layout.of_config(config))
    names = {part.tensor for place in found for parts in place.periods for part in parts}
    assert len([name for name in names if name.startswith("mtp.")]) == 15


@pytest.mark.parametrize("name", RELEASES)
def test_configs_there_and_back(name):
    config = RELEASES[name]
    raw = json.loads(json.dumps(config_to_hf(config, dtype="bfloat16")))
    assert config_from_hf(raw) == config
    text = raw | {"tie_word_embeddings": not config.tied_head}
    if name != "80B-A3B":
        kind = raw["model_type"].removesuffix("_text")
        whole = {"model_type": kind, "text_config": text, "tie_word_embeddings": config.tied_head}
        assert config_from_hf(whole) == config
    assert config_from_hf(raw | {"output_gate_type": "swish"}) == config
    assert config_from_hf(raw | {"output_gate_type": "sigmoid"}).output_gate == "sigmoid"


def test_convert(tmp_path, capsys):
    source = FIXTURES / "qwen3_5"
    out = [str(tmp_path / name) for name in "abc"]
    assert main(["convert", str(source), out[0]]) == 0
    assert tensors_of(Path(out[0])).keys() == tensors_of(source).keys()
    assert main(["convert", str(source), out[1], "--text-only", "--dtype", "float16"]) == 0
    assert not any("visual" in name for name in tensors_of(Path(out[1])))
    assert load(out[1])[0].embedding.dtype == jnp.float16
    assert main(["convert", str(source), out[1]]) == 2
    assert "must be a new or an empty folder" in capsys.readouterr().err
    assert main(["convert", str(source), out[2], "--text-only", "--like", out[0]]) == 2
    assert "give --like or --text-only, not both" in capsys.readouterr().err
