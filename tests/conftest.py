"""Strict JAX for every test, and a source of random keys that can be replayed."""

import gc
import importlib.metadata
import itertools
import os
import pathlib
import random
import subprocess
import sys
import zlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # libtpu is there to compile for TPUs that are not
# Compiling is what the tests spend their time on. LLVM's optimisations and jaxlib 0.10's fusion emitters are off, since
# both cost more than they save here. XLA_FLAGS= switches all on.
FLAGS, EMITTERS = "--xla_backend_optimization_level=0", " --xla_cpu_use_fusion_emitters=false"
fewer_passes = os.environ.get("XLA_FLAGS", FLAGS) == FLAGS  # pytest-xdist's workers find them set
if fewer_passes:
    os.environ["XLA_FLAGS"] = FLAGS
    if importlib.metadata.version("jaxlib").startswith("0.10."):
        os.environ["XLA_FLAGS"] += EMITTERS

import jax  # noqa: E402 (reads the flags)
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

if fewer_passes:
    # XLA aborts at a flag that it does not know, and later versions do not know the emitters'. libtpu is one, and so may
    # a test's own process be: they are not to see it, once jaxlib has read it.
    jax.jit(lambda: 0)()
    os.environ["XLA_FLAGS"] = FLAGS

MAPS = pathlib.Path("/proc/self/maps")
_finished = itertools.count(1)


def pytest_runtest_teardown():
    """Drop compiled programs before the kernel's limit on a process's mappings (65,530 on Linux): each program holds
    some, and beyond it the compiler crashes."""
    if next(_finished) % 10 == 0 and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem):
    """Tests of equal bits between programs of different shapes hold for what XLA makes by default, and run so in a
    process of their own."""
    if not (fewer_passes and pyfuncitem.get_closest_marker("all_passes")):
        return None
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", pyfuncitem.nodeid]
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return True


@pytest.fixture
def getkey(request):
    """A function that returns a fresh PRNG key at each call. Every test has its own seed, the same in every run;
    DELTANOX_TEST_SEED=<a number> draws others."""
    seed = int(os.environ.get("DELTANOX_TEST_SEED", zlib.crc32(request.node.name.encode())))
    print(f"{request.node.name}: DELTANOX_TEST_SEED={seed}")
    rng = random.Random(seed)

    def getkey():
        return jax.random.key(rng.randint(0, 2**31 - 1))

    return getkey


@pytest.fixture
def unchecked():
    """Without the run-time type checker, whose own error would come first."""
    from jaxtyping import config

    config.update("jaxtyping_disable", True)
    yield
    config.update("jaxtyping_disable", False)
