"""Fields of `config.json` that may stand in two places, and the names of files that may not lead out of a folder."""

import json
import shutil
from pathlib import Path

import pytest

from checkpoints import FIXTURES
from deltanox._read import member
from deltanox.interop import config_from_hf, load


def variants(family):
    """Names of changes, with the changed contents of a `config.json`."""
    raw = json.loads((FIXTURES / family / "config.json").read_text())
    text = raw.get("text_config", raw)
    rope = {k: v for k, v in text["rope_parameters"].items() if k not in ("rope_theta", "partial_rotary_factor")}
    inner = text["rope_parameters"]
    outer = {"rope_theta": 12345.0, "partial_rotary_factor": 0.5}
    changes = {
        "beside only": outer | {"rope_parameters": rope},
        "inside and beside": outer | {"rope_parameters": inner},
        "no table": outer | {"rope_parameters": None},
        "older name": outer | {"rope_parameters": None, "rope_scaling": rope | {"rope_type": "default"}},
        "both names": outer | {"rope_parameters": inner, "rope_scaling": inner | {"rope_theta": 777.0}},
        "empty older name": {"rope_parameters": inner, "rope_scaling": {}},
    }
    for name, change in changes.items():
        yield name, raw | {"text_config": text | change} if text is not raw else raw | change
    if text is not raw:
        for a in (True, False):
            for b in (True, False):
                tied = {"tie_word_embeddings": a, "text_config": text | {"tie_word_embeddings": b}}
                yield f"tied {a} outside, {b} inside", raw | tied


CASES = [
    pytest.param(family, raw, id=f"{family}, {name}") for family in ("qwen3_5", "qwen3_next") for name, raw in variants(family)
]  # fmt: skip


@pytest.mark.parametrize("family, raw", CASES)
def test_the_value_is_that_of_transformers(family, raw):
    transformers = pytest.importorskip("transformers")
    rest = {k: v for k, v in json.loads(json.dumps(raw)).items() if k != "model_type"}
    theirs = transformers.AutoConfig.for_model(raw["model_type"], **rest)
    ours, text = config_from_hf(raw), theirs.get_text_config()
    assert ours.rope_theta == text.rope_parameters["rope_theta"]
    assert ours.rotary_fraction == text.rope_parameters["partial_rotary_factor"]
    assert ours.tied_head == theirs.tie_word_embeddings


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_the_outer_value_counts_where_the_table_has_none(family):
    cases = dict(variants(family))
    for name in ("beside only", "no table", "older name"):
        config = config_from_hf(cases[name])
        assert (config.rope_theta, config.rotary_fraction) == (12345.0, 0.5)
    assert config_from_hf(cases["both names"]).rope_theta == 777.0
    assert config_from_hf(cases["inside and beside"]).rope_theta not in (12345.0, 777.0)


NAMES = ["../other/model.safetensors", "a/../../b", "/etc/passwd", "C:\\a", "\\\\host\\a", "..\\a", "C:a", "", ".."]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_that_leads_out_of_the_folder(tmp_path, name):
    with pytest.raises(ValueError, match=r"must name files inside it, but it names '.*': fetch it again"):
        member(tmp_path, name)


def test_shards_of_another_folder_are_not_opened(tmp_path):
    for name in ("mine", "other"):
        shutil.copytree(FIXTURES / "qwen3_5_moe", tmp_path / name)
    index = tmp_path / "mine" / "model.safetensors.index.json"
    table = json.loads(index.read_text())
    table["weight_map"] = {key: f"../other/{file}" for key, file in table["weight_map"].items()}
    index.write_text(json.dumps(table))
    with pytest.raises(ValueError, match="must name files inside it, but it names '../other/model-0"):
        load(tmp_path / "mine")


def linked(folder: Path, target: Path):
    """Every file of `folder` moved to `target`, with a link in its place."""
    target.mkdir(parents=True)
    for file in sorted(folder.iterdir()):
        file.rename(target / f"hash-{file.name}")
        file.symlink_to(target / f"hash-{file.name}")


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])  # one file; shards
def test_links(tmp_path, family):
    """Into Hugging Face's cache and through a linked folder: followed. To anywhere else: refused."""
    folder = tmp_path / "models--x" / "snapshots" / "revision"
    shutil.copytree(FIXTURES / family, folder)
    linked(folder, tmp_path / "models--x" / "blobs")
    load(folder)
    (tmp_path / "link").symlink_to(folder)
    load(tmp_path / "link")
    weights = max(folder.iterdir(), key=lambda path: path.stat().st_size)
    elsewhere = tmp_path / "elsewhere"
    weights.resolve().rename(elsewhere)
    weights.unlink()
    weights.symlink_to(elsewhere)
    with pytest.raises(
        ValueError, match=r"must lie in its folder, but it is a link to `.*elsewhere`: copy the file into"
    ):
        load(folder)
