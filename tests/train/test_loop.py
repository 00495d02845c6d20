"""The loop as a whole, on a model that is small enough to train in a second."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import deltanox
from deltanox.train import TrainingDiverged, find_checkpoint, read_log, train
from deltanox.train._log import Log
from tiny_model import TinyModel, make_tiny
from tiny_run import make_text, run, steps, tiny_config


@pytest.fixture
def text(tmp_path):
    make_text(tmp_path / "text")
    return tmp_path / "text"


def test_a_run_leaves_log_picture_checkpoints_and_figures(tmp_path, text):
    sampled = []
    config = tiny_config(tmp_path / "run", validate_every=10, steps=60, checkpoint_every=25, validation_batches=1)
    result, said = run(config, text, sample=lambda model, config, vocabulary, key: sampled.append(model) or "sample!")
    records = steps(result.directory)
    assert [record["step"] for record in records] == list(range(1, 61))
    assert records[0]["bits_per_byte"] == pytest.approx(np.log2(257), rel=0.05)
    assert result.validation < 4.5 < records[0]["bits_per_byte"]
    assert records[0]["learning_rate"] < records[5]["learning_rate"] > records[-1]["learning_rate"]
    validations = [r for r in read_log(result.directory / "log.jsonl") if "validation_bits_per_byte" in r]
    assert [record["step"] for record in validations] == [10, 20, 30, 40, 50, 60]
    assert validations[-1]["validation_bits_per_byte"] == result.validation
    assert (result.directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in (result.directory / "checkpoints").iterdir()) == [
        "step_00000050",
        "step_00000060",
    ]
    assert sampled[0] is result.model and said[-1] == "sample!"
    figures = f"model {result.validation:.4f}, Markov model of order 2 {result.markov:.4f}, gzip -9 {result.gzip:.4f}"
    assert any(figures in sentence for sentence in said)
    assert any("file by file, " in sentence and "in one archive, xz -9 in one archive" in sentence for sentence in said)
    # the last record has the value on the batch of the short validations too
    assert validations[-1]["first_batches_bits_per_byte"] != result.validation
    assert any(sentence.startswith("compiled the step in ") for sentence in said)
    assert said[0].startswith("text: ") and " kB in 40 files: " in said[0] and "0.00 MB" not in "".join(said)


def test_one_file_trains(tmp_path):
    """A file of its own, far longer than a row: pieces of it are held out, and all of it is used."""
    (tmp_path / "input.txt").write_text("the cat sat on a mat.\n" * 400)
    result, said = run(tiny_config(tmp_path / "run", steps=6), tmp_path / "input.txt")
    assert np.isfinite(result.validation)
    assert said[0].startswith("text: 8.8 kB in 1 file: ") and "1 piece cut out of the files" in said[0]


PROGRAM = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_loop import *
directory, text, kind, number = Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], int(sys.argv[5])
from deltanox.train import _checkpoint, _loop
calls = 0
def deadly(function):
    def call(*args, **kwargs):
        global calls
        calls += 1
        if calls == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call
if kind == "step":      # after so many batches were read
    _loop._next = deadly(_loop._next)
if kind == "write":     # after half of a file of a checkpoint
    write = _checkpoint._write
    def half(path, data):
        global calls
        calls += 1
        if calls == number:
            path.write_bytes(data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(path, data)
    _checkpoint._write = half
if kind == "rename":
    _checkpoint.Path.rename = deadly(_checkpoint.Path.rename)
run(tiny_config(directory), text, resume=directory if directory.exists() else None)
"""


def in_a_process(directory, text, kind="none", number=0):
    here = Path(__file__).parent
    paths = [Path(deltanox.__file__).parents[1], here.parent]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths)), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(here), str(directory), str(text), kind, str(number)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The run that is never stopped, and its text."""
    folder = tmp_path_factory.mktemp("straight")
    make_text(folder / "text")
    assert in_a_process(folder / "run", folder / "text") == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    # A checkpoint is two files and one renaming; one is written at step 0, then at 8, 16 and 24.
    "kills",
    [
        [("step", 5)],  # before the checkpoint of step 8
        [("step", 20), ("step", 3)],  # twice
        [("write", 3)],  # half of the arrays of step 8
        [("write", 6)],  # half of the record of step 16
        [("rename", 3), ("rename", 1)],  # before step 16 has its name, twice
    ],
    ids=lambda kills: "_".join(f"{kind}{number}" for kind, number in kills),
)
def test_killed_and_resumed_is_bit_equal(tmp_path, straight, kills):
    for kind, number in kills:
        assert in_a_process(tmp_path / "killed", straight / "text", kind, number) == -signal.SIGKILL
    assert in_a_process(tmp_path / "killed", straight / "text") == 0
    compare_runs(straight / "run", tmp_path / "killed")


def compare_runs(a, b):
    for old, new in zip(steps(a), steps(b), strict=True):
        for name in ("step", "loss", "bits_per_byte", "gradient_norm", "learning_rate"):
            assert old[name] == new[name], (old["step"], name)
    arrays = [find_checkpoint(folder).folder / "arrays.safetensors" for folder in (a, b)]
    assert arrays[0].read_bytes() == arrays[1].read_bytes()


def test_interrupted_and_resumed_is_bit_equal(tmp_path, text, monkeypatch):
    """The same without processes: the loop is left by an exception between two checkpoints."""
    from deltanox.train import _loop

    straight, _ = run(tiny_config(tmp_path / "straight"), text)
    config = tiny_config(tmp_path / "stopped")
    original, calls = _loop._next, []

    def stop(*args):
        calls.append(args)
        if len(calls) == 13:
            raise KeyboardInterrupt
        return original(*args)

    monkeypatch.setattr(_loop, "_next", stop)
    with pytest.raises(KeyboardInterrupt):
        run(config, text)
    monkeypatch.setattr(_loop, "_next", original)
    assert find_checkpoint(config.train.directory).record["step"] == 8
    assert len(steps(config.train.directory)) > 8  # what was logged after the checkpoint is cut off
    with open(tmp_path / "stopped" / "log.jsonl", "a") as file:
        file.write('{"step": 12, "lo')
    resumed, _ = run(config, text, resume=config.train.directory)
    compare_runs(straight.directory, resumed.directory)
    assert resumed.validation == straight.validation


def test_resuming_with_something_else_is_refused(tmp_path, text):
    config = tiny_config(tmp_path / "run", steps=6)
    run(config, text)
    with pytest.raises(ValueError, match=r"train.directory: `.*run` holds a run already; resume with --resume"):
        run(config, text)
    other = dataclasses.replace(config, data=dataclasses.replace(config.data, seed=1))
    with pytest.raises(ValueError, match=r"another config \(data.seed was 0 and is 1\)"):
        run(other, text, resume=tmp_path / "run")
    # More steps than the finished run's are no other config.
    longer, said = run(tiny_config(tmp_path / "run", steps=7), text, resume=tmp_path / "run")
    assert [record["step"] for record in steps(longer.directory)] == list(range(1, 8))
    assert said[0].startswith("all 6 steps of the run are done; it is trained to step 7, with the learning rates")
    config = tiny_config(tmp_path / "run", steps=7)
    with pytest.raises(ValueError, match=r"another config \(train.steps was 7 and is 6\).*or start a new run$"):
        run(tiny_config(tmp_path / "run", steps=6), text, resume=tmp_path / "run")
    # The text of the run is known; a changed one is noticed.
    said = []
    train(config, resume=tmp_path / "run", make_model=make_tiny, say=said.append, progress=False)
    assert said[0] == "all 7 steps of the run are done; to train it longer, add --set train.steps=14, or more"
    validations = [r for r in read_log(tmp_path / "run" / "log.jsonl") if "validation_bits_per_byte" in r]
    assert [record["step"] for record in validations] == [6, 7]  # the last one is not logged again
    (text / "more.txt").write_text("more")
    with pytest.raises(ValueError, match="was written on other text than what is under"):
        train(config, resume=tmp_path / "run", make_model=make_tiny, say=said.append, progress=False)


def test_a_folder_left_by_a_run_that_never_began_is_taken(tmp_path, text):
    (tmp_path / "run" / "checkpoints" / ".writing_1").mkdir(parents=True)
    result, _ = run(tiny_config(tmp_path / "run", steps=6), text)
    assert {path.name for path in (result.directory / "checkpoints").iterdir()} == {"step_00000000", "step_00000006"}


def test_an_older_checkpoint_beside_newer_ones_is_refused(tmp_path, text):
    config = tiny_config(tmp_path / "run")
    run(config, text)
    with pytest.raises(
        ValueError, match=r"`step_00000024` is newer than .*; give the run's folder, or delete the newer"
    ):
        run(config, text, resume=tmp_path / "run" / "checkpoints" / "step_00000016")


def poisoned(when):
    """A model whose loss, or only whose gradient, is NaN once one of its weights has moved by a tenth."""

    def make(config, key):
        class Poisoned(TinyModel):
            def hidden(self, tokens, state=None, **kwargs):
                hidden, state, stats = super().hidden(tokens, state, **kwargs)
                weight = self.embedding[ord("t"), 0]
                far = jnp.abs(weight) > 0.1
                if when == "loss":
                    hidden = jnp.where(far, jnp.nan, hidden)
                else:  # √x at x = 0 · weight: the value is finite, the derivative 0 · ∞
                    hidden = hidden + jnp.sqrt(jnp.where(far, 0 * weight, 1))
                return hidden, state, stats

        model = Poisoned(config.model, key=key)
        return eqx.tree_at(lambda m: m.embedding, model, model.embedding.at[ord("t"), 0].set(0.0))

    return make


@pytest.mark.parametrize("when", ["loss", "gradient"])
def test_nan_stops_the_run_and_leaves_the_last_good_checkpoint(tmp_path, text, when):
    config = tiny_config(tmp_path / "run", steps=100, checkpoint_every=3)
    with pytest.raises(TrainingDiverged, match=f"{when}.* is nan at step \\d+; .*step_") as error:
        train(config, text=[text], make_model=poisoned(when), say=lambda _: None, progress=False)
    records = steps(config.train.directory)
    last = records[-1]["step"]
    assert 3 < last < 100 and f"at step {last};" in str(error.value)
    assert all(np.isfinite(record["loss"]) and np.isfinite(record["gradient_norm"]) for record in records[:-1])
    checkpoint = find_checkpoint(tmp_path / "run")
    assert checkpoint.record["step"] == (last - 1) // 3 * 3 and f"step {checkpoint.record['step']})" in str(error.value)
    data = (checkpoint.folder / "arrays.safetensors").read_bytes()
    assert all(np.isfinite(x).all() for x in safetensors.numpy.load(data).values())


def test_several_steps_a_call(tmp_path, text):
    """Calls stop at checkpoints and validations, the log has every step, and a resumption is bit-equal."""
    from deltanox.train import _loop

    values = dict(steps_per_call=5, validate_every=12, validation_batches=1)
    single, _ = run(tiny_config(tmp_path / "single"), text)
    several, _ = run(tiny_config(tmp_path / "several", **values), text)
    config = tiny_config(tmp_path / "several", **values)
    counts, step = [], 0
    while step < config.train.steps:
        counts.append(_loop._count(config, step))
        step += counts[-1]
    assert counts == [5, 3, 4, 4, 5, 3]
    a, b = (steps(tmp_path / name) for name in ("single", "several"))
    assert [r["step"] for r in b] == list(range(1, 25))
    assert [r["loss"] for r in b] == pytest.approx([r["loss"] for r in a], rel=1e-4)
    shutil.rmtree(tmp_path / "several" / "checkpoints" / "step_00000024")
    resumed, _ = run(config, text, resume=tmp_path / "several")
    assert [r["loss"] for r in steps(tmp_path / "several")] == [r["loss"] for r in b]
    assert resumed.validation == several.validation


def test_the_device_is_not_waited_for_at_each_step(tmp_path, text, monkeypatch):
    """When a step is dispatched, the metrics of the two before it have not been asked for yet."""
    from deltanox.train import _report

    events = []
    push, read = _report.Report.push, _report.Report._read

    def pushed(self, step, count, metrics):
        events.append(("dispatched", step))
        push(self, step, count, metrics)

    def reading(self):
        events.append(("read", self.pending[0][0]))
        read(self)

    monkeypatch.setattr(_report.Report, "push", pushed)
    monkeypatch.setattr(_report.Report, "_read", reading)
    run(tiny_config(tmp_path / "run", steps=9, checkpoint_every=0), text)
    assert events.index(("dispatched", 7)) < events.index(("read", 5)) < events.index(("dispatched", 8))
    assert events[-2:] == [("read", 8), ("read", 9)]


def test_log_survives_a_cut_line(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 0.1}\n{"step": 2, "loss": NaN}\n{"step": 3, "lo')
    assert [record["step"] for record in read_log(path)] == [1, 2]
    log = Log(path, step=1)
    log.write(step=2, loss=1 / 3)
    log.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1, "loss": 0.1},
        {"step": 2, "loss": 1 / 3},
    ]
