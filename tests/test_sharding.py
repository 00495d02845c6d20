"""`jax.shard_map` over batch and heads: values of gradients, with JAX's check of what varies over the mesh and without."""

import os
import pathlib
import re
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("cases", "count"), [("quick", 5), pytest.param("all", 34, marks=pytest.mark.slow)])
def test_gradients_on_four_devices(cases, count):
    script = pathlib.Path(__file__).with_name("sharded.py")
    done = subprocess.run(
        [sys.executable, script, cases], capture_output=True, text=True, timeout=900, env={**os.environ}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    errors = re.findall(r"^(.*) check_vma=(?:True|False) (\S+)$", done.stdout, re.MULTILINE)
    assert len(errors) == count, done.stdout
    for name, error in errors:
        assert float(error) <= 1e-5, f"{name}: {error}"
