"""Checkpoints that transformers wrote, against the logits that it computes from them (see make_fixtures.py)."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import deltanox
from checkpoints import FAMILIES, FIXTURES, same, tensors_of
from deltanox.interop import load, save
from deltanox.interop._load import make_skeleton
from deltanox.models import QWEN3_5_SIZES, Qwen3NextConfig
from deltanox.tools.bench_load import MEASURE
from helpers import rel


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    folder = FIXTURES / request.param
    return folder, load_file(folder / "expected.safetensors"), *load(folder, dtype="float32")


SOURCE = Path(deltanox.__file__).parents[1]


@eqx.filter_jit
def run(model, tokens, **kwargs):
    return jax.vmap(lambda tokens, kwargs: model(tokens, **kwargs)[0])(tokens, kwargs)


def close(got, want):
    assert np.abs(np.asarray(got) - want).max() < 1e-4
    assert rel(got, want) < 1e-5


def test_logits(family):
    _, expected, model, _ = family
    close(run(model, jnp.asarray(expected["tokens"])), expected["logits"])


def test_left_padding():
    name = "qwen3_5"
    expected, (model, _) = load_file(FIXTURES / name / "expected.safetensors"), load(FIXTURES / name, dtype="float32")
    mask = expected["mask"]
    got = run(model, jnp.asarray(expected["tokens"]), mask=jnp.asarray(mask))
    close(np.asarray(got)[mask], expected["padded_logits"][mask])


def test_packed_and_padded(family):
    """The rows as documents of one row, with their padding between."""
    _, expected, model, _ = family
    rows, length = expected["tokens"].shape
    mask = expected["mask"]
    ids = jnp.asarray(np.repeat(np.arange(rows), length)[None])
    tokens = jnp.asarray(expected["tokens"].reshape(1, -1))
    got = run(model, tokens, segment_ids=ids, mask=jnp.asarray(mask.reshape(1, -1)))
    close(np.asarray(got).reshape(rows, length, -1)[mask], expected["padded_logits"][mask])


def test_positions_of_images():
    name = "qwen3_5"
    model, _ = load(FIXTURES / name, dtype="float32")
    expected = load_file(FIXTURES / name / "expected.safetensors")
    positions = jnp.asarray(np.swapaxes(expected["axes"], 0, 1))
    close(run(model, jnp.asarray(expected["tokens"]), positions=positions), expected["axes_logits"])
    assert rel(expected["axes_logits"], expected["logits"]) > 1e-2


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_one_token_further(name):
    """Rows 65 and 67: the head is loaded, and its input is the output of the final norm."""
    model, config = load(FIXTURES / name, dtype="float32")
    expected = load_file(FIXTURES / name / "expected.safetensors")
    tokens = jnp.asarray(expected["tokens"][0])
    assert config.mtp_head

    @eqx.filter_jit
    def further(model, tokens):
        x, _, _ = model.layers(model.embed(tokens))
        return [model.mtp_logits(hidden[:-1], tokens[1:])[0] for hidden in (model.norm(x), x)]

    after, before = further(model, tokens)
    close(after, expected["mtp_logits"][0])
    assert rel(before, expected["mtp_logits"][0]) > 1e-2
    without, config = load(FIXTURES / name, mtp=False)
    assert without.mtp is None and not config.mtp_head
    with pytest.raises(ValueError, match="the model has no head for one token further"):
        without.mtp_logits(jnp.zeros((2, 16)), tokens[:2])


def test_dtypes(family):
    folder, _, _, config = family
    model, _ = load(folder)
    assert isinstance(config, Qwen3NextConfig) == (folder.name == "qwen3_next")
    kept = [
        x.dtype for period in model.layers.layers.blocks[:1] for x in (period.mixer.A_log, period.mixer.norm.weight)
    ]
    assert model.embedding.dtype == jnp.bfloat16 and set(kept) == {jnp.dtype("float32")}
    stored = tensors_of(folder)
    name = next(name for name in stored if name.endswith("layers.2.linear_attn.A_log"))
    assert stored[name].dtype == (np.float32 if folder.name == "qwen3_5" else jnp.bfloat16)
    assert np.array_equal(model.layers[1].blocks[0].mixer.A_log, stored[name].astype(np.float32))


@pytest.fixture
def variant(tmp_path):
    """A checkpoint of other tensors and another config: `make(name, change, config)`."""

    def make(name, change=lambda tensors: tensors, **config):
        folder = tmp_path / "variant"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        raw = json.loads((FIXTURES / name / "config.json").read_text()) | config
        (folder / "config.json").write_text(json.dumps(raw))
        save_file(change(tensors_of(FIXTURES / name)), folder / "model.safetensors")
        return folder

    return make


PREFIXES = ["model.", "language_model.model.", "model.language_model.model.", "language_model.", ""]


@pytest.mark.parametrize("trunk", PREFIXES)
@pytest.mark.parametrize("head", ["lm_head.", "language_model.lm_head."])
def test_prefixes(variant, trunk, head):
    """Row 64."""

    def rename(tensors):
        found = {}
        for name, x in tensors.items():
            for old, new in (("lm_head.", head), ("mtp.", head.replace("lm_head", "mtp")), ("model.", trunk)):
                if name.startswith(old):
                    found[new + name.removeprefix(old)] = x
                    break
        assert len(found) == len(tensors)
        return found

    same(load(variant("qwen3_next", rename))[0], load(FIXTURES / "qwen3_next")[0])


def test_experts_packed_and_each_by_itself(variant):
    """The packed tensors of Qwen3.5, and the same as each expert's own."""

    def separate(tensors):
        found = dict(tensors)
        for name in tensors:
            module, _, kind = name.rpartition(".")
            if kind == "gate_up_proj":
                for e, both in enumerate(found.pop(name)):
                    for part, half in zip(("gate", "up"), np.split(both, 2)):
                        found[f"{module}.{e}.{part}_proj.weight"] = np.ascontiguousarray(half)
            elif kind == "down_proj":
                for e, one in enumerate(found.pop(name)):
                    found[f"{module}.{e}.down_proj.weight"] = one
        assert len(found) > len(tensors)
        return found

    same(load(variant("qwen3_5_moe", separate))[0], load(FIXTURES / "qwen3_5_moe")[0])


def test_decay_rates_in_either_dtype(variant):
    """Row 21."""

    def rounded(tensors):
        return {n: x.astype(jnp.bfloat16) for n, x in tensors.items()}

    a, _ = load(variant("qwen3_5", rounded))
    b, _ = load(FIXTURES / "qwen3_5")
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b)):
        assert x.dtype == y.dtype and rel(x.astype(jnp.float32), y.astype(jnp.float32)) < 5e-3


def test_a_tied_head_may_be_there_and_must_be_the_embedding(variant):
    """Row 63."""

    def head(scale):
        return lambda t: (
            t | {"lm_head.weight": t["model.language_model.embed_tokens.weight"] * np.asarray(scale, "bfloat16")}
        )

    model, _ = load(variant("qwen3_5", head(1)))
    assert model.head is None
    with pytest.raises(ValueError, match=r"`lm_head.weight` is not the embedding, though config.json ties them: set"):
        load(variant("qwen3_5", head(2)))
    model, _ = load(variant("qwen3_5", head(2), tie_word_embeddings=False))
    assert np.array_equal(model.head, 2 * model.embedding)


def test_old_configs(variant):
    """Of transformers 4: theta and fraction beside, the interval in place of the layers' kinds."""
    raw = json.loads((FIXTURES / "qwen3_next" / "config.json").read_text())
    folder = variant("qwen3_next")
    rope = raw.pop("rope_parameters")
    kinds = raw.pop("layer_types")
    raw |= {
        "rope_theta": rope["rope_theta"], "partial_rotary_factor": rope["partial_rotary_factor"], "rope_scaling": None,
        "full_attention_interval": kinds.index("full_attention") + 1,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(raw))
    assert load(folder)[1] == load(FIXTURES / "qwen3_next")[1]


def test_a_sharding(family):
    folder, _, model, _ = family
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    paths = []

    def where(path, array):
        paths.append(path)
        return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*[None] * (array.ndim - 1), "x"))

    sharded, _ = load(folder, dtype="float32", sharding=where)
    same(sharded, model)
    assert ".layers.layers.blocks[0].mixer.in_proj_qkv.weight" in paths and len(paths) == len(jax.tree.leaves(model))
    assert {x.sharding.mesh for x in jax.tree.leaves(sharded)} == {mesh}


CHILD = """
import sys, jax, numpy as np
from deltanox.interop import load
from jax.sharding import NamedSharding, PartitionSpec as P
mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
for folder in sys.argv[1:]:
    def where(path, array):
        # rows over two devices and columns over two, wherever they divide, the periods too
        axes = [name if size % 2 == 0 else None for name, size in zip(("a", "b"), array.shape)]
        return NamedSharding(mesh, P(*axes))
    parts = jax.tree.leaves(load(folder, dtype="float32", sharding=where)[0])
    whole = jax.tree.leaves(load(folder, dtype="float32")[0])
    assert all(np.array_equal(a, b) for a, b in zip(parts, whole)) and len(parts) == len(whole) > 30
    assert sum(len({str(s.index) for s in x.addressable_shards}) == 4 for x in parts) > 10
print("equal")
"""


def test_four_devices():
    """Each device's part is cut out of the file: of fused projections and experts too."""
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", CHILD, *(str(FIXTURES / name) for name in FAMILIES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(SOURCE)})
    assert done.stdout == "equal\n", done.stderr


@pytest.mark.slow
def test_memory(tmp_path):
    """The host holds the model in the target dtype and at most the largest tensor besides."""
    config = dataclasses.replace(QWEN3_5_SIZES["0.8B"], num_layers=8, vocab_size=60_000)
    model = jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), make_skeleton(config, "bfloat16"))
    save(model, config, tmp_path / "big", shard_bytes=10**8)
    largest = config.vocab_size * config.embed_size
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        done = subprocess.run(
            [sys.executable, "-c", MEASURE, str(tmp_path / "big"), dtype], capture_output=True, text=True, check=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(SOURCE)},
        )  # fmt: skip
        peak, held = map(int, done.stdout.split())
        print(dtype, "peak", peak, "model", held)
        assert held > 300e6 and peak < held + size * largest
