"""Files that others wrote, damaged in every way: the command line answers in one sentence, never with a traceback."""

import contextlib
import copy
import io
import json
import math
import shutil
import struct
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints import FIXTURES
from deltanox._read import field, parse_json, read_json_file, read_toml
from deltanox.cli import main
from deltanox.generate import load_state, save_state
from deltanox.interop import config_from_hf, load
from deltanox.interop._files import Checkpoint
from deltanox.models import Qwen3_5Config, qwen3_5
from deltanox.train import config_from_dict, find_checkpoint, load_arrays, save_checkpoint
from deltanox.train._config import config_to_dict, read_config
from deltanox.train._loop import data_position
from helpers import SMALL_MODEL
from tokenizer import END, write_tokenizer

pytestmark = pytest.mark.usefixtures("unchecked")
DEEP = b"[" * 100_000 + b"]" * 100_000
TOML = f"""
implementation = "xla"{SMALL_MODEL}mtp_head = true
[precision]
compute = "float32"
[data]
row_length = 32
batch_size = 2
[optimiser]
warmup_steps = 1
[train]
steps = 4
[remat]
policy = "kernels"
mlp = "remat"
[residuals]
states_every = 2
[lora]
rank = 2
targets = ["o_proj"]
"""

# ---------------------------------------------------------------- how a file is damaged

VALUES = st.sampled_from(
    [
        None, True, 0, -1, 3, 10**30, -(10**400), 2.5, 1e300, math.nan, math.inf, "", "x", "../x", "\x00", [], [1],
        ["a"], [[1]], {}, {"a": 1}, {"a": {"b": None}}, json.loads("[" * 60 + "]" * 60),
    ]
)  # fmt: skip


def places(value, path=()):
    """The paths to all values in nested tables and lists."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path] * bool(path) + [place for key, x in inner for place in places(x, (*path, key))]


@st.composite
def damaged_tables(draw, table):
    """A table with one value, at any depth, deleted or replaced."""
    table = copy.deepcopy(table)
    *outer, last = draw(st.sampled_from(places(table)))
    inner = table
    for key in outer:
        inner = inner[key]
    if draw(st.integers(0, 3)):
        inner[last] = draw(VALUES)
    else:
        del inner[last]
    return table


def damaged_bytes(data: bytes):
    return st.one_of(
        st.integers(0, len(data) - 1).map(lambda n: data[:n]),
        st.integers(0, len(data) - 1).map(lambda n: data[:n] + b"\xff\xfe" + data[n + 1 :]),
        st.just(b"\xef\xbb\xbf" + data),
        st.sampled_from([DEEP, b'{"a":' + DEEP + b"}", b"", b"null", b"[]", b'"x"', b"3", b"NaN", b"a = " + DEEP]),
    )


def damaged_json(table):
    """The bytes of a JSON file."""
    tables = damaged_tables(table).map(lambda t: json.dumps(t).encode())
    return st.one_of(tables, tables, tables, damaged_bytes(json.dumps(table).encode()))


def toml(table) -> bytes:
    """Nested tables as TOML, as far as TOML can hold them."""

    def value(x):
        if isinstance(x, dict):
            return "{" + ", ".join(f"{json.dumps(key)} = {value(y)}" for key, y in x.items()) + "}"
        if isinstance(x, list):
            return "[" + ", ".join(map(value, x)) + "]"
        return "1979-05-27" if x is None else json.dumps(x).replace("NaN", "nan").replace("Infinity", "inf")

    return "\n".join(f"{name} = {value(x)}" for name, x in table.items()).encode()


def quickly(examples):
    return settings(
        max_examples=examples, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
    )


def refuses(*arguments) -> str:
    """What the command line says of wrong input: one sentence, and exit status 2."""
    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):
        assert main(list(map(str, arguments))) == 2
    assert err.getvalue().startswith("deltanox: ") and "Traceback" not in err.getvalue()
    return err.getvalue()


# ---------------------------------------------------------------- whole files, from the command line


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """A config, and a checkpoint with a tokenizer and all that stands beside it."""
    folder = tmp_path_factory.mktemp("start")
    (folder / "small.toml").write_text(TOML)
    shutil.copytree(FIXTURES / "qwen3_5", folder / "model")
    write_tokenizer(folder / "model", eos_token={"content": END}, bos_token=None)
    (folder / "model" / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    return folder


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_checkpoint_to_start_from(start, name):
    """Nothing is compiled: the text that is asked for does not exist, which is said where the file is accepted."""
    path = start / "model" / name
    whole = path.read_bytes()
    arguments = ("train", start / "small.toml", "--from", start / "model", "--text", start / "nowhere")
    assert "nowhere` is neither a file nor a folder" in refuses(*arguments)
    path.write_bytes(b"\xef\xbb\xbf" + whole)
    assert "nowhere` is neither a file nor a folder" in refuses(*arguments)
    for deep in (DEEP, b'{"a":' + DEEP + b"}"):
        path.write_bytes(deep)
        refuses(*arguments)

    @quickly(30)
    @given(damaged_json(json.loads(whole)))
    def check(data):
        path.write_bytes(data)
        refuses(*arguments)

    try:
        check()
    finally:
        path.write_bytes(whole)


def test_a_config(start):
    path = start / "damaged.toml"
    arguments = ("train", path, "--text", start / "nowhere")

    @quickly(120)
    @given(st.one_of(damaged_tables(read_toml(start / "small.toml")).map(toml), damaged_bytes(TOML.encode())))
    def check(data):
        path.write_bytes(data)
        refuses(*arguments)

    check()
    path.write_bytes(b"\xef\xbb\xbf" + TOML.encode())
    assert read_config(path) == read_config(start / "small.toml")
    path.write_bytes(b"[model]\nembed_size = " + DEEP)
    assert "damaged.toml` must be nested at most 100 levels deep, but it is deeper" in refuses(*arguments)
    assert "steps" in refuses("train", start / "small.toml", "--set", f"train.steps={DEEP.decode()}")


def test_an_index_and_its_shards(start, tmp_path):
    folder = Path(shutil.copytree(FIXTURES / "qwen3_5_moe", tmp_path / "sharded"))
    index, shard = folder / "model.safetensors.index.json", folder / "model-00001-of-00002.safetensors"
    arguments = ("train", start / "small.toml", "--from", folder, "--set", "train.further_weight=0.1")
    table, data = json.loads(index.read_text()), shard.read_bytes()
    for wrong, words in [(None, "null"), ([], "a list of 0"), (3, "3"), ("x", "'x'")]:
        index.write_text(json.dumps(table | {"weight_map": wrong}))
        assert f"`weight_map` must be a table of texts, but it is {words}: fetch it again" in refuses(*arguments)
    for wrong, words in [(3, "3"), ([], "a list of 0"), (None, "null")]:
        index.write_text(json.dumps(table | {"weight_map": {"a": wrong}}))
        assert f"`weight_map` must be a table of texts, but its 'a' is {words}" in refuses(*arguments)

    @quickly(60)
    @given(damaged_json(table))
    def check_index(changed):
        index.write_bytes(changed)
        refuses(*arguments)

    check_index()
    index.write_text(json.dumps(table))
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])

    @quickly(60)
    @given(damaged_json(header))
    def check_header(changed):
        shard.write_bytes(struct.pack("<Q", len(changed)) + changed + data[8 + size :])
        refuses(*arguments)

    check_header()
    shard.write_bytes(data)
    assert Checkpoint(folder).tensors


@pytest.mark.parametrize("version", [1, 2])
def test_the_record_of_a_run(start, tmp_path, version):
    """`checkpoint.json` with and without the hash that a change shows by."""
    pytest.importorskip("fcntl")
    config = config_from_dict(read_toml(start / "small.toml") | {"lora": {}})
    data = {"position": [0, 3], "fingerprint": "0" * 64, "text": [str(tmp_path / "nowhere")]}
    record = {"config": config_to_dict(config), "data": data, "versions": {}, "run": "1"}
    path = save_checkpoint(tmp_path / "checkpoints", {"x": np.ones(3, "f4")}, 2, record) / "checkpoint.json"
    table = json.loads(path.read_text()) | {"version": version}
    if version == 1:
        del table["sha256"]
    arguments = ("train", "--resume", tmp_path)
    if version == 1:
        path.write_text(json.dumps(table))
        assert "nowhere` is neither a file nor a folder" in refuses(*arguments)
        for name in ("config", "data"):
            path.write_text(json.dumps({key: x for key, x in table.items() if key != name}))
            assert f"checkpoint.json`: there is no `{name}" in refuses(*arguments)

    @quickly(60)
    @given(damaged_json(table))
    def check(changed):
        path.write_bytes(changed)
        refuses(*arguments)
        refuses("generate", tmp_path)
        try:
            found = find_checkpoint(tmp_path)
            data_position(found)
            load_arrays(found, {"x": jax.ShapeDtypeStruct((3,), np.float32)})
        except ValueError:
            pass

    check()


# ---------------------------------------------------------------- what no command reaches so early


def refusal(table) -> str | None:
    try:
        config_from_hf(table)
    except ValueError as error:
        return str(error)


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_next"])
def test_sizes_and_positions(family):
    raw = json.loads((FIXTURES / family / "config.json").read_text())

    @quickly(200)
    @given(damaged_tables(raw))
    def check(table):
        sentence = refusal(table)
        assert sentence is None or "config.json" in sentence or "Config: `" in sentence

    check()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"text_config": None}, "`text_config` must be a table, but it is null: correct it"),
        ({"text_config": [1, 2]}, "`text_config` must be a table, but it is a list of 2"),
        ({"text_config": "x"}, "`text_config` must be a table, but it is 'x'"),
        ({"rope_parameters": [1]}, "`rope_parameters` must be a table or null, but it is a list of 1"),
        ({"rope_parameters": "x"}, "`rope_parameters` must be a table or null, but it is 'x'"),
        ({"rope_scaling": "x"}, "`rope_scaling` must be a table or null, but it is 'x'"),
        ({"layer_types": 3}, "`layer_types` must be a list of texts or null, but it is 3"),
        ({"layer_types": [3]}, "`layer_types` must be a list of texts or null, but it is a list of 1"),
        ({"rope_parameters": {"mrope_section": 3}}, "`mrope_section` must be a list of integers or null, but it is 3"),
        ({"rms_norm_eps": 10**400}, "`rms_norm_eps` must be a finite number, but it is 1000"),
        ({"num_hidden_layers": True}, "`num_hidden_layers` must be an integer, but it is true"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "must be one table for all layers, but there is one of full_at"),
    ],
)  # fmt: skip
def test_a_field_of_another_kind(change, sentence):
    raw = json.loads((FIXTURES / "qwen3_5" / "config.json").read_text())
    if "text_config" not in change:
        rope = raw["text_config"]["rope_parameters"]
        rope = {k: rope | v if k == "rope_parameters" and isinstance(v, dict) else v for k, v in change.items()}
        change = {"text_config": raw["text_config"] | rope}
    with pytest.raises(ValueError, match="^config.json: .*" + sentence):
        config_from_hf(raw | change)


def test_a_model_larger_than_its_checkpoint(tmp_path):
    """Sizes that no tensor has are refused before anything of them is made."""
    folder = Path(shutil.copytree(FIXTURES / "qwen3_next", tmp_path / "model"))
    raw = json.loads((folder / "config.json").read_text())
    for change in (
        {"vocab_size": 2**40},
        {"num_hidden_layers": 2**40, "layer_types": None, "full_attention_interval": 1},
    ):
        (folder / "config.json").write_text(json.dumps(raw | change))
        with pytest.raises(
            ValueError, match=f"must be at most .*but by config.json it is {2**40}: correct config.json"
        ):
            load(folder)


def test_a_state(tmp_path):
    config = Qwen3_5Config(
        vocab_size=257, embed_size=8, num_layers=2, full_attention_interval=2, num_key_heads=1, num_value_heads=2,
        key_head_size=4, value_head_size=4, num_heads=2, num_kv_heads=1, head_size=8, mlp_size=8,
    )  # fmt: skip
    model = qwen3_5(config, key=jax.random.key(0))
    state = jax.tree.map(lambda x: x[None], model.init_state(4))
    file = tmp_path / "state"
    save_state(file, state, model)
    load_state(file, model)
    arrays, size = load_file(file), struct.unpack("<Q", file.read_bytes()[:8])[0]
    metadata = json.loads(file.read_bytes()[8 : 8 + size])["__metadata__"]
    for weights in (None, "", "{", "3", "[]", "null", '"x"', "[" * 100_000, json.dumps({"a": 1}), '{"a": "\\ud800"}'):
        changed = {k: x for k, x in (metadata | {"weights": weights}).items() if x is not None}
        save_file(arrays, file, changed)
        with pytest.raises(ValueError, match="^load_state: "):
            load_state(file, model)


def test_the_reader(tmp_path):
    path = tmp_path / "a.json"
    for encoding in ("utf-8", "utf-8-sig", "utf-16", "utf-32"):
        path.write_bytes('{"a": "ä"}'.encode(encoding))
        assert read_json_file(path, "") == {"a": "ä"}
    nested = json.dumps(json.loads('{"a": ' + "[" * 98 + "]" * 98 + "}"))
    assert parse_json(nested, "x", "")["a"]
    with pytest.raises(ValueError, match="^x must be nested at most 100 levels deep, but it is deeper: mend it$"):
        parse_json(nested.replace("[]", "[[[]]]"), "x", "mend it")
    table = {"a": {"b": 1, "c": True}, "n": None, "big": 10**400, "l": ["x" * 99, 1]}
    assert field("f", table, "a.b", int, remedy="") == 1 and field("f", table, "a.b", float, remedy="") == 1
    assert field("f", table, "no", int, remedy="", default=5) == 5
    assert field("f", table, "n", dict[str, int] | None, remedy="") is None
    for name, kind, sentence in [
        ("a.c", int, "f: `a.c` must be an integer, but it is true: r"),
        ("a.d", int, "f: there is no `a.d`: r"),
        ("n.d", int, "f: `n` must be a table, but it is null: r"),
        ("big", float, r"f: `big` must be a finite number, but it is 10+\.\.\.: r"),
        ("l", list[str], "f: `l` must be a list of texts, but its 1 is 1: r"),
        ("a", dict[str, int] | list[str], "f: `a` must be a table of integers or a list of texts, but it is a table of 2: r"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=f"^{sentence}$"):
            field("f", table, name, kind, remedy="r")
