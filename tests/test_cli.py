"""The command line: sentences for wrong use, and one small run from text to text."""

import importlib.util
import inspect
import io
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import deltanox
from checkpoints import same
from deltanox import cli
from deltanox._console import say
from deltanox.cli import main
from deltanox.generate import make_key
from deltanox.interop import load
from deltanox.train import BOUNDARY, find_checkpoint, read_log, ready_configs, train
from deltanox.train._sample import _decode, load_parameters
from helpers import SMALL_MODEL

CONFIG = f"""{SMALL_MODEL}tied_head = true
[data]
row_length = 32
batch_size = 2
validation_fraction = 0.3
[optimiser]
warmup_steps = 1
[train]
steps = 4
checkpoint_every = 2
sample_tokens = 5
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "small.toml"
    path.write_text(CONFIG)
    (tmp_path / "text").mkdir()
    for i in range(20):
        (tmp_path / "text" / f"{i}.txt").write_text(f"file {i} " * 9)
    return str(path)


def test_help_imports_nothing_heavy():
    program = """
import sys, deltanox.cli
try:
    deltanox.cli.main(["--help"])
except SystemExit:
    pass
print("heavy", *({"deltanox.train", "optax", "matplotlib", "tqdm"} & set(sys.modules)))
"""

    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(Path(deltanox.__file__).parents[1]), "PATH": "", "JAX_PLATFORMS": "cpu"},
    )
    assert done.returncode == 0, done.stderr
    for command in ("train", "generate", "convert", "configs", "aot", "bench"):
        assert command in done.stdout
    assert done.stdout.rstrip().endswith("heavy")


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (
            ["train"],
            "deltanox: train: give a config, such as qwen3_5_nano (`deltanox configs` lists them), or the folder of a run",
        ),
        (["train", "none.toml"], "deltanox: config: there is no file `none.toml`"),
        (["train", "text"], "deltanox: config: `text` is a folder and no ready config of that name; give the path"),
        (["train", "--text", "small.toml"], "deltanox: train: give a config and text, but `--text small.toml` is all"),
        (["train", "--text", "text", "--set", "a=b"], "deltanox: train: give a config, such as qwen3_5_nano"),
        (["train", "--text", "text", "small.toml", "--set", "train.steps=0"], "deltanox: config: train.steps must be"),
        (
            ["train", "--text", "text", "qwen3_5_nano", "--set", "train.steps=0"],
            "deltanox: config: train.steps must be",
        ),
        (["train", "small.toml", "--set", "implementation=reference"], "deltanox: config: implementation must be one"),
        (["configs", "qwen3_5_nan"], "deltanox: config: there is no file `qwen3_5_nan` and no ready config of that"),
        (
            ["convert", "text", "out", "--dtype", "float9"],
            "deltanox: convert: `dtype` must be one of bfloat16, float16",
        ),
        (["convert", "text", "out", "--dtype", "int8"], "deltanox: convert: `dtype` must be one of bfloat16, float16"),
        (["bench", "load", "--dtype", "float9"], "deltanox: bench load: `dtype` must be one of bfloat16, float16"),
        (["bench", "train", "none.toml"], "deltanox: config: there is no file `none.toml`"),
        (["bench", "step", "none.toml"], "deltanox: config: there is no file `none.toml`"),
        (["bench", "decode", "none.toml", "--no-peer"], "deltanox: config: there is no file `none.toml`"),
        (["aot", "none.toml"], "deltanox: config: there is no file `none.toml`"),
        (["train", "small.toml", "--set", "model.depth=4"], "deltanox: config: there is no `model.depth`; "),
        (["train", "small.toml", "--text", "nowhere"], "deltanox: text: `nowhere` is neither a file nor a folder"),
        (["train", "--resume", "nowhere"], "deltanox: checkpoint: there is no folder `nowhere`"),
        (["train", "small.toml", "--from", "nowhere"], "deltanox: config.json: there is no file `nowhere/config.json`"),
        (["train", "small.toml", "--from", "a", "--resume", "b"], "deltanox: train: give --from or --resume, not both"),
        (["convert", "text", "out"], "deltanox: checkpoint: no checkpoint under `text`"),
        (["generate", "text"], "deltanox: checkpoint: no checkpoint under `text`"),
    ],
)
def test_wrong_use_is_one_sentence(config, capsys, arguments, sentence):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(sentence) and error.count("\n") == 1


@pytest.mark.parametrize(
    "arguments, without",
    [(["decode", "small.toml"], "--no-peer"), (["train", "small.toml"], "--side deltanox")],
)
def test_a_benchmark_says_which_peer_is_missing(config, capsys, monkeypatch, arguments, without):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else name)
    assert main(["bench", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(
        f"deltanox: bench {arguments[0]}: the peer needs torch and transformers, but transformers cannot"
    )
    assert error.endswith(f"pip install torch transformers, or leave the peer out with {without}\n")


def test_the_config_behind_text_leaves_the_text(config, monkeypatch, capsys):
    """`--text a b small.toml`: the last is the config, the others are the text, with --resume all are."""
    seen = {}
    monkeypatch.setattr(deltanox.train, "train", lambda config, **options: seen.update(options, config=config))
    assert main(["train", "--text", "text", "more", config]) == 0
    assert seen["text"] == ["text", "more"] and seen["name"] == "small" and seen["config"].train.steps == 4
    assert main(["train", config, "--text", "text", "more.toml"]) == 0
    assert seen["text"] == ["text", "more.toml"]


def test_a_name_with_a_dot_names_the_run(monkeypatch):
    seen = {}
    monkeypatch.setattr(deltanox.train, "train", lambda config, **options: seen.update(options, config=config))
    assert main(["train", "qwen3_5_0.8b"]) == 0
    assert seen["name"] == "qwen3_5_0.8b"


def test_ready_configs_are_listed_and_printed(capsys):
    assert main(["configs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(ready_configs())
    assert any(line.startswith("qwen3_5_nano ") and "6,911,152 parameters" in line for line in lines)
    assert main(["configs", "qwen3_5_nano"]) == 0
    assert capsys.readouterr().out == ready_configs()["qwen3_5_nano"].read_text("utf-8")


def test_the_benchmarks_are_described(capsys):
    with pytest.raises(SystemExit):
        main(["bench", "--help"])
    told = capsys.readouterr().out
    for name in ("decode", "gdn", "load", "peers", "remat", "step", "train"):
        assert re.search(rf"^  {name} +[A-Z].{{20,}}$", told, re.MULTILINE), told


@pytest.mark.skipif(os.name != "posix", reason="permissions of POSIX")
def test_a_converted_checkpoint_is_told_and_readable_by_others(tmp_path, capsys):
    """Every file has the permissions of a new one, whatever those of the files that it is a copy of."""
    source = tmp_path / "source"
    shutil.copytree(Path(__file__).parent / "interop" / "fixtures" / "qwen3_5", source)
    (source / "generation_config.json").chmod(0o400)
    before = os.umask(0o027)
    try:
        assert main(["convert", str(source), str(tmp_path / "out"), "--dtype", "bfloat16"]) == 0
    finally:
        os.umask(before)
    files = list((tmp_path / "out").iterdir())
    assert {path.name for path in files} == {"config.json", "model.safetensors", "generation_config.json"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o640}
    size = sum(path.stat().st_size for path in files)
    assert capsys.readouterr().out == f"wrote 3 files, {size / 1e3:.1f} kB, to {tmp_path / 'out'}\n"


@pytest.mark.parametrize("seed", [99999999999999999999, 2**32, -1])
def test_a_seed_has_32_bits(seed, capsys):
    """Larger ones would be cut in silence: 2^32 would draw what 0 draws."""
    assert main(["generate", "nowhere", "--seed", str(seed)]) == 2
    assert capsys.readouterr().err == (
        f"deltanox: generate: the seed must be in [0, 2^32), but it is {seed}; give a smaller one\n"
    )
    assert (jax.random.key_data(make_key(2**32 - 1)) == jax.random.key_data(jax.random.key(2**32 - 1))).all()


@pytest.mark.parametrize("encoding, shown", [("ascii", b"a?? b?\n"), ("latin-1", b"a?\xe4 b?\n"), ("utf-8", None)])
def test_a_console_that_lacks_characters_shows_a_replacement(monkeypatch, encoding, shown):
    """No command and no training ends at a character."""
    text = "a→ä b\udcff"
    shown = "a→ä b?\n".encode() if shown is None else shown
    found = []
    monkeypatch.setattr(cli, "_bench", lambda _: print(text) or 0)
    for write in (lambda: say(text), lambda: main(["bench", "peers"])):
        monkeypatch.setattr("sys.stdout", io.TextIOWrapper(buffer := io.BytesIO(), encoding))
        write()
        sys.stdout.flush()
        found.append(buffer.getvalue())
    assert found == [shown, shown]
    assert inspect.signature(train).parameters["say"].default is say


def test_bytes_become_text_as_soon_as_they_are_characters():
    tokens = [ord("a"), 0xC3, 0xA4, 0xFF, ord("b"), 300, 0xE2, 0x82, BOUNDARY, ord("z")]
    assert list(_decode(iter(tokens))) == ["a", "ä", "\ufffd", "b", "\ufffd", "\ufffd"]


@pytest.mark.slow
def test_train_resume_generate(config, capsys):
    assert main(["train", config, "--text", "text", "--set", "train.steps=4"]) == 0
    first = capsys.readouterr().out
    run = Path("runs/small")
    assert "validation, bits per byte: model" in first and "sample after 'def ':\ndef " in first
    assert find_checkpoint(run).record["step"] == 4
    losses = [r["loss"] for r in read_log(run / "log.jsonl") if "loss" in r]

    # Another run of the same config gets a folder of its own, and the same losses.
    assert main(["train", config, "--text", "text"]) == 0
    assert [r["loss"] for r in read_log("runs/small-2/log.jsonl") if "loss" in r] == losses

    # Resumed from its own config and text, after a loss of the newest checkpoint.
    for path in find_checkpoint(run).folder.iterdir():
        path.unlink()
    find_checkpoint(run / "checkpoints" / "step_00000002")
    (run / "checkpoints" / "step_00000004").rmdir()
    assert main(["train", "--resume", str(run)]) == 0
    assert [r["loss"] for r in read_log(run / "log.jsonl") if "loss" in r] == losses
    assert main(["train", "--resume", str(run), "--set", "optimiser.learning_rate=0.1"]) == 2
    assert "optimiser.learning_rate was 0.001 and is 0.1" in capsys.readouterr().err

    generate = f"generate {run} --prompt ab --max-tokens 6 --temperature 0.9 --top-k 5 --seed 3".split()
    assert main(generate) == 0
    text = capsys.readouterr().out
    assert text.startswith("ab")
    assert main(generate) == 0
    assert capsys.readouterr().out == text
    assert main(["generate", str(run), "--top-p", "2"]) == 2
    assert "`top_p` must be above 0 and at most 1" in capsys.readouterr().err


@pytest.mark.slow
def test_to_a_checkpoint_and_on_from_it(config, capsys):
    """A run becomes a Hugging Face checkpoint, whose weights are those of another run's first step."""
    assert main(["train", config, "--text", "text", "--set", "train.steps=2"]) == 0
    assert main(["convert", "runs/small", "out"]) == 0
    trained, run = load_parameters("runs/small")
    model, sizes = load("out")
    assert sizes == run.model
    same(model, trained)
    assert main(["generate", "out", "--prompt", "ab", "--max-tokens", "3"]) == 0
    assert "ab" in capsys.readouterr().out

    other = [config, "--text", "text", "--set", "train.directory=on", "--set", "model.num_layers=4"]
    assert main(["train", *other, "--from", "out"]) == 0
    first, run = load_parameters("on/checkpoints/step_00000002")
    assert run.model == sizes and run.train.steps == 4
    shutil.rmtree("on/checkpoints/step_00000004")
    assert main(["train", "--resume", "on"]) == 0  # the checkpoint is not needed again
    assert jax.tree.structure(first) == jax.tree.structure(trained)
    before, after = (
        record["loss"]
        for record in [*read_log("runs/small/log.jsonl"), *read_log("on/log.jsonl")]
        if "loss" in record and record["step"] == 1
    )
    assert after < before
    Path("out/tokenizer.json").write_text("{}")
    assert main(["train", *other, "--from", "out"]) == 2
    assert "deltanox: tokenizer: `out/tokenizer.json` is no tokenizer: " in capsys.readouterr().err
