"""Checkpoints: what goes in comes out, and what is wrong is refused with a sentence."""

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import deltanox
from deltanox.train import find_checkpoint, load_arrays, save_checkpoint
from deltanox.train._checkpoint import clear_leftovers


def tree(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "f32": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32),
        "bf16": jnp.asarray(rng.normal(size=(5,)), jnp.bfloat16),
        "f16": jnp.asarray(rng.normal(size=(2, 1)), jnp.float16),
        "special": jnp.asarray([np.nan, np.inf, -0.0, 1e-45], jnp.float32),
        "int": jnp.asarray(seed, jnp.int32),
        "bool": jnp.asarray([True, False]),
        "empty": jnp.zeros((0, 3), jnp.float32),
        "uint": jnp.asarray([2**32 - 1], jnp.uint32),
        "key": jax.random.key(seed),
        "keys": jax.random.split(jax.random.key(seed, impl="rbg"), 3),
    }


def same(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype and x.shape == y.shape
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()
    return True


def test_round_trip_is_exact(tmp_path):
    original = tree(7)
    save_checkpoint(tmp_path, original, 12, {"data": {"position": [1, 2]}})
    checkpoint = find_checkpoint(tmp_path)
    assert checkpoint.record["step"] == 12 and checkpoint.record["data"] == {"position": [1, 2]}
    assert same(load_arrays(checkpoint, tree(0)), original)
    abstract = jax.eval_shape(lambda: tree(0))
    assert same(load_arrays(checkpoint, abstract), original)
    # A part of it.
    save_checkpoint(tmp_path, {"parameters": original, "other": jnp.zeros(3)}, 13, {})
    assert same(load_arrays(find_checkpoint(tmp_path), tree(0), prefix="['parameters']"), original)


def test_the_last_ones_are_kept_and_the_newest_found(tmp_path):
    for step in (1, 2, 9, 10, 11):
        save_checkpoint(tmp_path / "checkpoints", tree(step), step, {}, keep=3)
    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == ["step_00000009", "step_00000010", "step_00000011"]
    for place in (tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints" / "step_00000011"):
        assert find_checkpoint(place).record["step"] == 11
    assert find_checkpoint(tmp_path / "checkpoints" / "step_00000009").record["step"] == 9
    save_checkpoint(tmp_path / "checkpoints", tree(5), 11, {}, keep=3)  # the same step again
    assert same(load_arrays(find_checkpoint(tmp_path), tree(0)), tree(5))


def cut_arrays(folder):
    path = folder / "arrays.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


def flip_a_bit(folder):
    path = folder / "arrays.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(bytes(data))


def edit(**changes):
    def apply(folder):
        record = json.loads((folder / "checkpoint.json").read_text())
        (folder / "checkpoint.json").write_text(json.dumps(record | changes))

    return apply


@pytest.mark.parametrize(
    "damage, sentence",
    [
        (
            cut_arrays,
            r"truncated or foreign: it has \d+ bytes instead of \d+; delete this folder to go on from step_00000001",
        ),
        (flip_a_bit, "damaged: its hash is not the recorded one; delete this folder to go on from step_00000001"),
        (lambda f: (f / "arrays.safetensors").unlink(), "has no arrays.safetensors; delete this folder"),
        (
            lambda f: (f / "checkpoint.json").unlink(),
            "no readable checkpoint.json.*delete this folder to go on from step_00000001",
        ),
        (lambda f: (f / "checkpoint.json").write_text('{"format": "deltanox'), "no readable checkpoint.json"),
        (edit(step=3), "checkpoint.json` was changed after it was written: its hash is not the recorded one; undo"),
        (edit(keys={}), "was changed after it was written.*or delete this folder to go on from step_00000001"),
        (edit(sha256=None), "was changed after it was written"),
        (edit(format="other"), "was not written by deltanox"),
        (edit(version=99), "version 99 of the format, this deltanox reads 1 and 2"),
    ],
)
def test_a_damaged_checkpoint_is_refused(tmp_path, damage, sentence):
    for step in (1, 2):
        save_checkpoint(tmp_path, tree(step), step, {})
    damage(tmp_path / "step_00000002")
    with pytest.raises(ValueError, match=sentence):
        load_arrays(find_checkpoint(tmp_path), tree())
    shutil.rmtree(tmp_path / "step_00000002")  # the remedy
    assert same(load_arrays(find_checkpoint(tmp_path), tree()), tree(1))


def test_a_renamed_checkpoint_is_refused(tmp_path):
    save_checkpoint(tmp_path, tree(), 2, {}).rename(tmp_path / "step_00000007")
    with pytest.raises(ValueError, match=r"step_00000007` holds step 2, not that of its name; give it the name it had"):
        find_checkpoint(tmp_path)


def test_a_checkpoint_of_the_format_without_a_hash_is_read(tmp_path):
    folder = save_checkpoint(tmp_path, tree(), 2, {})
    edit(version=1, sha256=None)(folder)
    assert same(load_arrays(find_checkpoint(tmp_path), tree()), tree())


def test_values_that_are_not_finite_are_refused_and_nothing_is_written(tmp_path):
    save_checkpoint(tmp_path, {"x": jnp.ones(3, jnp.bfloat16), "n": jnp.int32(1)}, 1, {}, finite=True)
    for bad in (jnp.nan, jnp.inf):
        with pytest.raises(ValueError, match=r"array `\['x'\]` has 1 values of 3 that are not finite"):
            save_checkpoint(tmp_path, {"x": jnp.asarray([1, bad, 2], jnp.bfloat16)}, 2, {}, finite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


def test_a_kill_between_the_two_renamings_of_the_same_step_leaves_it_loadable(tmp_path):
    folder = save_checkpoint(tmp_path, tree(1), 1, {})
    folder.rename(tmp_path / f".old_{folder.name}")
    (tmp_path / ".writing_1").mkdir()
    clear_leftovers(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert same(load_arrays(find_checkpoint(tmp_path), tree()), tree(1))


def test_a_save_that_the_machine_refuses_leaves_what_was_there(tmp_path):
    """By the limit on the size of files, which stands for a full disk."""
    resource = pytest.importorskip("resource")
    save_checkpoint(tmp_path, {"x": np.ones(10, np.float32)}, 1, {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match="File too large") as error:
            save_checkpoint(tmp_path, {"x": np.ones(10_000, np.float32)}, 2, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert error.value.filename == str(tmp_path / "step_00000002")
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert find_checkpoint(tmp_path).record["step"] == 1


@pytest.mark.parametrize(
    "change, sentence",
    [
        (
            lambda t: t | {"f32": jnp.zeros((4, 3))},
            r"`\['f32'\]` is float32\[3, 4\], this run needs float32\[4, 3\]: it was written",
        ),
        (lambda t: t | {"bf16": jnp.zeros(5)}, r"`\['bf16'\]` is bfloat16\[5\], this run needs float32\[5\]"),
        (lambda t: t | {"new": jnp.zeros(5)}, r"has no array `\['new'\]`"),
        (
            lambda t: {k: v for k, v in t.items() if k != "int"},
            r"has an array `\['int'\]` that this run has no place for",
        ),
    ],
)
def test_another_structure_is_refused(tmp_path, change, sentence):
    save_checkpoint(tmp_path, tree(), 1, {})
    with pytest.raises(ValueError, match=sentence):
        load_arrays(find_checkpoint(tmp_path), change(tree()))


def test_nothing_to_find(tmp_path):
    with pytest.raises(ValueError, match="there is no folder"):
        find_checkpoint(tmp_path / "none")
    with pytest.raises(ValueError, match="no checkpoint under"):
        find_checkpoint(tmp_path)


@pytest.mark.parametrize("call", range(8))
def test_killed_while_writing(tmp_path, call):
    """SIGKILL at each call that a save makes on its files: the newest complete checkpoint is the old or the new one."""
    program = """
        import os, signal, sys
        from deltanox.train import _checkpoint as c
        import numpy as np
        directory, deadly = sys.argv[1], int(sys.argv[2])
        c.save_checkpoint(directory, {"x": np.full(1000, 1, np.float32)}, 1, {}, keep=1)
        calls = 0
        def deadly_version(module, name):
            original = getattr(module, name)
            def call(*args, **kwargs):
                global calls
                calls += 1
                if calls == deadly + 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)
            setattr(module, name, call)
        deadly_version(c.os, "fsync")
        deadly_version(c.shutil, "rmtree")
        deadly_version(c.Path, "rename")
        deadly_version(c.Path, "mkdir")
        c.save_checkpoint(directory, {"x": np.full(1000, 2, np.float32)}, 2, {}, keep=1)
        print("survived", calls)
    """
    environment = os.environ | {"PYTHONPATH": str(Path(deltanox.__file__).parents[1]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path), str(call)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    found = find_checkpoint(tmp_path)
    x = load_arrays(found, {"x": jax.ShapeDtypeStruct((1000,), np.float32)})["x"]
    assert found.record["step"] in (1, 2) and np.all(np.asarray(x) == found.record["step"])
    # What the dead process left is cleared away by the next save.
    save_checkpoint(tmp_path, {"x": np.full(1000, 3, np.float32)}, 3, {}, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000003"]
