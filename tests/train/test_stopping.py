"""Runs that are stopped, by signals or by the machine: what is saved, what is said, and that they go on bit-equal."""

import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import deltanox
from deltanox._oserror import sentence
from deltanox.precision import Precision
from deltanox.train import (
    BYTES,
    Corpus,
    OptimiserConfig,
    TrainingDiverged,
    TrainState,
    _loop,
    _versions,
    find_checkpoint,
    make_optimiser,
    read_documents,
    read_log,
    save_checkpoint,
    train,
)
from deltanox.train._folder import find_run, new_run
from deltanox.train._lock import RunIsOpen, lock
from deltanox.train._signals import StopRequest, TrainingStopped, fatal_interrupt, stop_requests
from tiny_model import make_tiny
from tiny_run import make_text, run, steps, tiny_config


@pytest.fixture(autouse=True)
def ctrl_c():
    """Python's own handler, also where the tests run in the background, with Ctrl-C ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


VALUES = dict(steps=12, checkpoint_every=0, validate_every=4, validation_batches=1)


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The folder of a run that nothing stops, beside its text."""
    folder = tmp_path_factory.mktemp("straight")
    make_text(folder / "text")
    run(tiny_config(folder / "run", **VALUES), folder / "text")
    return folder / "run"


def validations(directory):
    found = [record for record in read_log(directory / "log.jsonl") if "validation_bits_per_byte" in record]
    return [(record["step"], record["validation_bits_per_byte"]) for record in found]


def compare_runs(a, b):
    for old, new in zip(steps(a), steps(b), strict=True):
        for name in ("step", "loss", "bits_per_byte", "gradient_norm", "learning_rate"):
            assert old[name] == new[name], (old["step"], name)
    arrays = [find_checkpoint(folder).folder / "arrays.safetensors" for folder in (a, b)]
    assert arrays[0].read_bytes() == arrays[1].read_bytes()
    assert validations(a) == validations(b)


def on_call(number, function, act):
    """`function`, before whose call of this number `act` is called."""
    calls = []

    def call(*args, **kwargs):
        calls.append(args)
        if len(calls) == number:
            act()
        return function(*args, **kwargs)

    return call


def interrupt():
    raise KeyboardInterrupt


def test_stopped_three_times_and_resumed_is_bit_equal(tmp_path, straight, monkeypatch):
    """By SIGTERM between two steps, dead between a checkpoint and its validation, by Ctrl-C in the last validation."""
    directory, text = tmp_path / "a run", straight.parent / "text"
    config = tiny_config(directory, **VALUES)

    with monkeypatch.context() as patch:  # the first call is before the loop
        patch.setattr(_loop, "_next", on_call(7, _loop._next, lambda: signal.raise_signal(signal.SIGTERM)))
        with pytest.raises(
            TrainingStopped, match="stopped at step 6, which is saved; 6 steps are left; go on with: "
        ) as error:
            run(config, text)
    assert error.value.exit_status == 143 and str(error.value).endswith(f" deltanox train --resume '{directory}'")
    assert find_checkpoint(directory).record["step"] == 6 == len(steps(directory))
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")

    with monkeypatch.context() as patch:
        patch.setattr(_loop, "_evaluate", on_call(1, _loop._evaluate, interrupt))
        patch.setattr(_versions, "versions", lambda: {"jax": "0.0.1"})
        with pytest.raises(KeyboardInterrupt):
            run(tiny_config(directory, **VALUES | {"checkpoint_every": 8}), text, resume=directory)
    assert find_checkpoint(directory).record["step"] == 8
    assert [step for step, _ in validations(directory)] == [4]

    said = []
    with monkeypatch.context() as patch:
        patch.setattr(
            _loop, "_validate_all", on_call(1, _loop._validate_all, lambda: signal.raise_signal(signal.SIGINT))
        )
        with pytest.raises(
            TrainingStopped, match="stopped at step 12, which is saved; its final validation is left"
        ) as e:
            train(config, resume=directory, make_model=make_tiny, say=said.append, progress=False)
    assert e.value.exit_status == 130 and [step for step, _ in validations(directory)] == [4, 8]
    assert not any("resumed on other software" in line for line in said)

    monkeypatch.setattr(_versions, "versions", lambda: {"jax": "0.0.1"})
    _, said = run(config, text, resume=directory)
    assert any("resumed on other software or another device (jax was '" in line for line in said)
    assert [line for line in said if line.startswith("validating on all ")]
    compare_runs(straight, directory)


def test_a_validation_ends_at_a_request_to_stop(tmp_path):
    stop = StopRequest()
    stop.signal = signal.SIGINT
    make_text(tmp_path / "text")
    state = TrainState(None, None, jnp.int32(0), jax.random.key(0))
    corpus = Corpus(read_documents([tmp_path / "text"]), BYTES)
    assert _loop._evaluate(interrupt, state, tiny_config(tmp_path), corpus, stop) is None


def test_a_second_signal_does_what_it_did_without_a_run(capfd):
    with stop_requests() as stop:
        assert not stop
        signal.raise_signal(signal.SIGINT)
        assert stop and stop.signal == signal.SIGINT
        assert "stopping after this step; once more to stop at once" in capfd.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    before = signal.getsignal(signal.SIGINT)
    with stop_requests():
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before
    with fatal_interrupt():
        assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is before


def test_ignored_signals_stay_ignored_and_other_threads_have_no_signals():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_requests() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop
    finally:
        signal.signal(signal.SIGHUP, before)

    def other():
        with stop_requests() as stop, fatal_interrupt():
            entered.append(bool(stop))

    entered = []
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert entered == [False]


def test_one_process_writes_to_a_run(tmp_path, straight, monkeypatch):
    text = straight.parent / "text"
    refusal = rf"must be open in one process only, but process {os.getpid()} on .* writes to it: wait for its end or"
    with lock(straight):
        with pytest.raises(ValueError, match=refusal):
            run(tiny_config(straight, **VALUES), text, resume=straight)
        with pytest.raises(ValueError, match=refusal):
            run(tiny_config(straight, **VALUES), text)
    monkeypatch.chdir(tmp_path)
    config = tiny_config("")
    with new_run(config, "run") as first, new_run(config, "run") as second:
        assert (first, second) == (Path("runs/run"), Path("runs/run-2"))
    with lock(first):
        pass


@pytest.mark.slow
def test_a_lock_ends_with_the_process_that_held_it(tmp_path):
    """SIGKILL is the end that no process can prepare for."""
    program = "import sys, time; from deltanox.train._lock import lock; from pathlib import Path\n"
    program += "with lock(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    environment = os.environ | {"PYTHONPATH": str(Path(deltanox.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        with pytest.raises(RunIsOpen, match=f"process {other.pid} on"), lock(tmp_path):
            pass
        other.kill()
    with lock(tmp_path):
        pass


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    for name, number in (("a", "1111"), ("b", "2222")):
        save_checkpoint(tmp_path / name / "checkpoints", {"x": jnp.ones(1)}, 5, {"run": number})
        (tmp_path / name / "run_id").write_text(f"{number}\n")
    assert find_run(tmp_path / "a").record["run"] == "1111"
    foreign = tmp_path / "b" / "checkpoints" / "step_00000005"
    foreign.rename(tmp_path / "a" / "checkpoints" / "step_00000006")
    with pytest.raises(ValueError, match="holds step 5, not that of its name"):
        find_run(tmp_path / "a")
    (tmp_path / "a" / "checkpoints" / "step_00000006").rename(foreign)
    (tmp_path / "a" / "checkpoints" / "step_00000005").rename(tmp_path / "gone")
    foreign.rename(tmp_path / "a" / "checkpoints" / "step_00000005")
    with pytest.raises(
        ValueError, match=r"belongs to another run than `.*a` \(its number is 2222, `.*run_id` says 1111"
    ):
        find_run(tmp_path / "a")


def test_more_steps_are_for_a_finished_run(straight):
    checkpoint = find_checkpoint(straight)
    unfinished = checkpoint._replace(record=checkpoint.record | {"step": 8})
    with pytest.raises(ValueError, match=r"train.steps was 12 and is 13\).*; a run can be made longer once all its"):
        _loop._check_resumption(unfinished, tiny_config(straight, **VALUES | {"steps": 13}), print)


def test_what_a_killed_process_left_is_removed_at_the_next_start(tmp_path):
    for name in ("checkpoints", "frozen"):
        (tmp_path / name / ".writing_1").mkdir(parents=True)
    for name in (".writing_log.jsonl", ".writing_loss.png"):
        (tmp_path / name).touch()
    with new_run(tiny_config(tmp_path), "run"):
        assert [path.name for path in tmp_path.rglob(".writing*")] == []


def test_the_home_folder_and_a_file_as_the_folder_of_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with new_run(tiny_config("~/some/run"), "run") as directory:
        assert directory == tmp_path / "some" / "run" and directory.is_dir()
    with pytest.raises(ValueError, match="no folder `.*/some/other`"):
        find_checkpoint("~/some/other")
    with pytest.raises(ValueError, match="`~nobody-of-this-name/run` must begin with the home folder of a user"):
        new_run(tiny_config("~nobody-of-this-name/run"), "run").__enter__()
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="train.directory: `.*file` must be a folder or a new name, but it is a file"):
        new_run(tiny_config(tmp_path / "file"), "run").__enter__()


def test_parameters_that_are_not_finite_are_not_saved(tmp_path, straight, monkeypatch):
    """Loss and gradient of the step before are finite, as after an update in float16."""

    monkeypatch.setattr(_loop, "make_optimiser", lambda *_: optax.scale(float("nan")))
    with pytest.raises(
        TrainingDiverged, match=r"array `.parameters.* are not finite at step 1; .*step_00000000` \(step"
    ):
        run(
            tiny_config(tmp_path / "run", **VALUES | {"checkpoint_every": 1}),
            straight.parent / "text",
        )
    assert find_checkpoint(tmp_path / "run").record["step"] == 0


def test_a_validation_that_is_not_finite_is_no_success(straight):
    assert _loop._finite(1.5, 12, straight) == 1.5
    with pytest.raises(
        TrainingDiverged, match="bits per byte of the validation text are nan at step 12; .*start a run"
    ):
        _loop._finite(float("nan"), 12, straight)


@pytest.mark.parametrize("name", ["parameter", "compute", "state"])
def test_training_in_float16_is_refused(tmp_path, name):
    config = tiny_config(tmp_path / "run")
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, **{name: "float16"}))
    with pytest.raises(ValueError, match=rf"precision.{name} must be float32, .* but it is float16: .*; give bfloat16"):
        run(config, tmp_path)


def test_an_epsilon_that_is_zero_in_the_dtype_of_the_parameters_is_refused():
    parameters = {"weight": jnp.ones((2, 2), jnp.float16)}
    with pytest.raises(ValueError, match=r"optimiser.epsilon must be above 0 .*, but 1e-08 is 0 in float16: store"):
        make_optimiser(OptimiserConfig(), 10, parameters)
    make_optimiser(OptimiserConfig(epsilon=1e-4), 10, parameters)
    make_optimiser(OptimiserConfig(), 10, {"weight": jnp.ones((2, 2), jnp.bfloat16)})


@pytest.mark.parametrize("name", ["parameter", "compute", "accumulation", "state", "decay"])
def test_casting_to_float64_needs_64_bit_types(name):
    precision = Precision(**{name: "float64"})
    with pytest.raises(ValueError, match=f"Precision: `{name}` is float64, .* switched off: set the environment"):
        precision.cast_compute({"x": jnp.ones(2)})
    with jax.enable_x64(True):
        dtype = precision.cast_compute({"x": jnp.ones(2, jnp.float32)})["x"].dtype
    assert dtype == (np.float64 if name == "compute" else np.float32)


def test_float64_is_refused_without_64_bit_types(tmp_path):
    config = tiny_config(tmp_path / "run")
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, compute="float64"))
    with pytest.raises(
        ValueError, match="`compute` is float64, which needs JAX's 64-bit types, .* JAX_ENABLE_X64=1, or"
    ):
        run(config, tmp_path)


def test_a_picture_that_cannot_be_drawn_is_said(tmp_path, straight):
    (tmp_path / "log.jsonl").write_bytes((straight / "log.jsonl").read_bytes())
    (tmp_path / "loss.png").mkdir()
    said = []
    _loop._draw(tmp_path, {}, said.append)
    assert len(said) == 1 and said[0].startswith(f"no picture of the losses was drawn: `{tmp_path}")
    assert not list(tmp_path.glob(".writing*"))


@contextlib.contextmanager
def small_disk(folder, size):
    """A file system of its own of `size`, at `folder`, and a function that mounts it anew with other options."""
    if sys.platform != "linux":
        pytest.skip("tmpfs is Linux's")
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], capture_output=True)
    if done.returncode:
        pytest.skip("mounting is not permitted")
    try:
        yield lambda options: subprocess.run(["mount", "-o", f"remount,{options}", folder], check=True)
    finally:
        subprocess.run(["umount", folder], check=True)


def test_a_full_disk_and_a_read_only_one(tmp_path, straight):
    """The newest complete checkpoint stays, nothing half written is left, and with room the run goes on bit-equal."""
    text, directory = straight.parent / "text", tmp_path / "disk" / "run"
    config = tiny_config(directory, **VALUES | {"checkpoint_every": 1, "keep_checkpoints": 20})
    with small_disk(tmp_path / "disk", "900k") as remount:
        with pytest.raises(OSError, match="No space left on device") as error:
            run(config, text)
        newest = find_checkpoint(directory)
        assert error.value.filename == str(directory / "checkpoints" / f"step_{newest.record['step'] + 1:08d}")
        assert newest.record["step"] > 2 and not list(directory.rglob(".writing*"))
        remount("ro")
        with pytest.raises(OSError, match="Read-only file system") as error:
            run(config, text, resume=directory)
        assert sentence(error.value).startswith(f"`{directory}")
        remount("rw,size=8m")
        run(config, text, resume=directory)
        compare_runs(straight, directory)


@contextlib.contextmanager
def command(folder, text, *values):
    """A process of the command that trains for very long, once it has logged a step or compiled the program."""
    from test_cli import CONFIG

    (folder / "small.toml").write_text(CONFIG)
    environment = os.environ | {"PYTHONPATH": str(Path(deltanox.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    line = [sys.executable, "-m", "deltanox.cli", "train", "small.toml", "--text", str(text)]
    for value in ("train.steps=1000000", "train.checkpoint_every=0", *values):
        line += ["--set", value]
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(line, env=environment | {"PYTHONUNBUFFERED": "1"}, cwd=folder, **pipes) as process:
        assert process.stdout is not None
        while not process.stdout.readline().startswith("compiled the step"):
            assert process.poll() is None
        yield process
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_command_with_its_status(tmp_path, straight, number):
    log = tmp_path / "runs" / "small" / "log.jsonl"
    with command(tmp_path, straight.parent / "text") as process:
        while not log.exists() or b"\n" not in log.read_bytes():
            time.sleep(0.05)
        process.send_signal(number)
        _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + number, error
    assert error.rstrip().endswith("go on with: deltanox train --resume runs/small") and "Traceback" not in error
    step = find_checkpoint(tmp_path / "runs" / "small").record["step"]
    assert 0 < step == len(steps(tmp_path / "runs" / "small"))


@pytest.mark.slow
def test_a_second_signal_ends_the_command_inside_a_step(tmp_path, straight):
    """The device works on a call that takes far longer than the test."""
    with command(tmp_path, straight.parent / "text", "train.steps_per_call=100000") as process:
        time.sleep(1)
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        while "stopping after this step" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=20) == -signal.SIGTERM
    assert find_checkpoint(tmp_path / "runs" / "small").record["step"] == 0
    assert not list((tmp_path / "runs" / "small").rglob(".writing*"))
